"""The version of this package, as commits record it."""

from __future__ import annotations

from importlib import metadata

__all__ = ["VERSION"]

VERSION = metadata.version("dcp-storage")
