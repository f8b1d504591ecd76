"""The life of a run: its steps, retention, pins, the manager."""
