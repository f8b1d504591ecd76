"""Committed, checksummed, resharding checkpoint storage for ``torch.distributed.checkpoint``."""
