"""Partial loads and listings: from real stores, in one process."""
