"""The servers that ``doctor`` is run against."""

from __future__ import annotations

from tests.foreign.conftest import azurite, fake_gcs, ftp, rclone

__all__ = ["azurite", "fake_gcs", "ftp", "rclone"]
