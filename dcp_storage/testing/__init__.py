"""The test kit, shipped for third parties: conformance suite, faults, recording, rank workers."""
