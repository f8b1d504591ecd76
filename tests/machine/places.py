"""Where a member may be stopped or meet something, and what it may meet."""

from __future__ import annotations

import re

from dcp_storage.wrappers import Request
from tests.machine.members import about

__all__ = ["FOREIGN", "MISHAPS", "PLACES", "SAVING", "is_at"]

FOREIGN = {
    "notes.txt": b"mine",
    "__init__.py": b"",
    "model.distcp": b"mine",
    ".commit.bak": b"{}",
    ".manifest.json": b"{}",
}
"""Files in the folder that are not ours, some of names like ours."""
PLACES: dict[str, tuple[str, str]] = {
    "commit": ("create", r"\.commit.*"),
    "claim": ("create", r"\.claim"),
    "manifest": ("put", r"\.manifest.*"),
    "view": ("put", r"\.metadata"),
    "file": ("put|upload|complete", r"__.*"),
    "removal": ("delete", r".*"),
    "listing": ("entries", r".*"),
    "reading": ("read|read_into", r".*"),
}
"""Where a member may be stopped or meet a fault: the operations and names of the request before which that is."""
SAVING = ["commit", "commit", "claim", "manifest", "view", "file"]

MISHAPS = ["lost", "later", "again", "refuse", "nowhere", "kill"]


def is_at(request: Request, place: str) -> bool:
    """Whether a request is one before which that place is."""
    operations, pattern = PLACES[place]
    return request.operation in operations.split("|") and re.fullmatch(pattern, about(request)) is not None
