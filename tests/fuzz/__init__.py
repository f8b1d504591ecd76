"""Bytes from a store that nobody vouches for: valid ones mutated, and read by every parser in bounded children."""
