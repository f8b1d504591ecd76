"""The disk that the snapshots are made on."""

from __future__ import annotations

from tests.crash.conftest import local_place

__all__ = ["local_place"]
