"""A machine that drives saves, loads, deletes, prunes and adoptions on one folder against a plain model of it."""
