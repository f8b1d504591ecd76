"""The filesystems behind :class:`dcp_storage.store.Store`; the only code that opens any."""
