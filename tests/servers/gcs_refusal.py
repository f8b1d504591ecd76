"""An answer of the strict GCS server that says no."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Refusal"]

REASONS = {
    304: "notModified",
    400: "invalid",
    401: "authError",
    403: "forbidden",
    404: "notFound",
    405: "methodNotAllowed",
    409: "conflict",
    410: "gone",
    412: "conditionNotMet",
    416: "requestedRangeNotSatisfiable",
}


class Refusal(Exception):  # noqa: N818 - it is an answer, not an error of the server
    """An answer that says no.

    Attributes:
        status: the HTTP status.
        message: for people.
        headers: extra headers of the answer.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})

    @property
    def resource(self) -> dict[str, Any]:
        """The JSON body."""
        entry = {"message": self.message, "domain": "global", "reason": REASONS.get(self.status, "backendError")}
        return {"error": {"code": self.status, "message": self.message, "errors": [entry]}}
