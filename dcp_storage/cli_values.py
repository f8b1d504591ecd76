"""What a user types, as values: options of the store, sizes, shares, spans of time (pure, but for the environment)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

__all__ = ["ENVIRONMENT", "WrongUse", "bytes_of_text", "share_of_text", "span_of_text", "storage_options"]

ENVIRONMENT = "DCP_STORAGE_OPTIONS"
"""The environment variable that holds storage options, as a JSON object."""

_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class WrongUse(Exception):  # noqa: N818 - reads as what happened
    """What was typed cannot be meant; the text says why."""


def storage_options(given: Iterable[str] | None) -> dict[str, Any]:
    """The store's options: those of the environment, and over them those of the flags.

    Args:
        given: ``key=value`` each. A value that is JSON is taken as that, anything else as text; a key with dots goes
            into nested options (``client_kwargs.endpoint_url=http://…``).

    Raises:
        WrongUse: one has no ``=``, or the environment holds no JSON object.
    """
    options = _from_environment()
    for text in given or ():
        key, found, value = text.partition("=")
        if not found or not key:
            raise WrongUse(f"-o takes key=value, not {text!r}.")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        *path, last = key.split(".")
        place = options
        for name in path:
            inner = place.get(name)
            place[name] = dict(inner) if isinstance(inner, dict) else {}
            place = place[name]
        place[last] = parsed
    return options


def _from_environment() -> dict[str, Any]:
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise WrongUse(f"{ENVIRONMENT} is no JSON: {error.msg} at character {error.pos}.") from error
    if not isinstance(found, dict):
        raise WrongUse(f'{ENVIRONMENT} must be a JSON object such as {{"anon": true}}, not a {type(found).__name__}.')
    return found


def bytes_of_text(text: str) -> int:
    """``"64MiB"``, ``"64M"`` or ``"67108864"``; units are powers of 1024.

    Raises:
        WrongUse: it is no size.
    """
    found = _BYTES.fullmatch(text.strip())
    if not found:
        raise WrongUse(f"{text!r} is no size such as 64MiB.")
    return int(float(found[1]) * 1024 ** ("KMGT".index(found[2].upper()) + 1 if found[2] else 0))


def share_of_text(text: str) -> float:
    """``"5%"`` or ``"0.05"``.

    Raises:
        WrongUse: it is no share, or not more than 0 and at most 1.
    """
    number = text.strip()
    try:
        share = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError as error:
        raise WrongUse(f"{text!r} is no share such as 5% or 0.05.") from error
    if not 0 < share <= 1:
        raise WrongUse(f"A share is more than 0% and at most 100%, not {text}.")
    return share


def span_of_text(text: str) -> timedelta:
    """``"7d"``, ``"12h"``, ``"30m"`` or ``"90s"``.

    Raises:
        WrongUse: it is no span of time.
    """
    found = _SPAN.fullmatch(text.strip())
    if not found:
        raise WrongUse(f"{text!r} is no span of time such as 7d, 12h, 30m or 90s.")
    return timedelta(seconds=float(found[1]) * _SECONDS[found[2].lower()])
