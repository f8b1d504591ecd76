"""Measurements: what is measured, on which state, against whom, and how it is printed."""
