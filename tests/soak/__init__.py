"""A run that saves and loads for a long time over a link that breaks, and what it must not lose or collect."""
