"""Programs for those who work on the package; each says in its own words how it is run."""
