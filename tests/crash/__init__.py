"""Crash enumeration: every call of a save, a delete, a prune, an adopt or a copy, and a real process killed there."""
