"""Listings of the strict GCS server: prefixes, delimiters, pages, and only the fields that were asked for."""

from __future__ import annotations

import base64
import re
from typing import Any

from tests.servers.gcs_objects import Bucket, Params
from tests.servers.gcs_refusal import Refusal

__all__ = ["list_objects", "only"]

PAGE = 1000


def list_objects(bucket: Bucket, params: Params) -> dict[str, Any]:
    """One page, in the order of the names' UTF-8 bytes; names and prefixes count together.

    Raises:
        Refusal: 400 for a page token that is none of ours, or a size of pages that makes no sense.
    """
    prefix, delimiter = params.get("prefix", ""), params.get("delimiter", "")
    most = params.get("maxResults", str(PAGE))
    if not most.isdigit() or not int(most):
        raise Refusal(400, f"Invalid maxResults: {most!r}")
    after = _place(params["pageToken"]) if "pageToken" in params else None
    items: list[dict[str, Any]] = []
    prefixes: list[str] = []
    shown = None
    for name in sorted(bucket.objects, key=lambda text: text.encode("utf-8", "surrogatepass")):
        if not name.startswith(prefix):
            continue
        if "startOffset" in params and name.encode() < params["startOffset"].encode():
            continue
        if "endOffset" in params and params["endOffset"] and name.encode() >= params["endOffset"].encode():
            continue
        head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        shared = prefix + head + found if found else None
        mark = shared or name
        if after is not None and (mark.encode() <= after.encode()):
            continue
        if prefixes and prefixes[-1] == shared:
            continue
        if len(items) + len(prefixes) == min(int(most), PAGE):
            token = base64.urlsafe_b64encode(f"after:{shown}".encode()).decode("ascii")
            return only(_page(items, prefixes, token), params.get("fields"))
        shown = mark
        if shared is None:
            items.append(bucket.objects[name].resource(bucket.name))
        else:
            prefixes.append(shared)
    return only(_page(items, prefixes, None), params.get("fields"))


def _place(token: str) -> str:
    try:
        text = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True).decode("utf-8")
    except ValueError:
        text = ""
    if not text.startswith("after:"):
        raise Refusal(400, "Invalid pageToken")
    return text.removeprefix("after:")


def _page(items: list[dict[str, Any]], prefixes: list[str], token: str | None) -> dict[str, Any]:
    page: dict[str, Any] = {"kind": "storage#objects"}
    if items:
        page["items"] = items
    if prefixes:
        page["prefixes"] = prefixes
    if token is not None:
        page["nextPageToken"] = token
    return page


def only(value: dict[str, Any], fields: str | None) -> dict[str, Any]:
    """The fields that were asked for: names, and names with those inside them in brackets, one level deep."""
    if fields is None:
        return value
    if not re.fullmatch(r"\w+(\([\w,]+\))?(,\w+(\([\w,]+\))?)*", fields):
        raise Refusal(400, f"Invalid field selection {fields!r}")
    out: dict[str, Any] = {}
    for name, inner in re.findall(r"(\w+)(?:\(([\w,]+)\))?", fields):
        if name not in value:
            continue
        kept = value[name]
        if inner:
            kept = [{key: item[key] for key in inner.split(",") if key in item} for item in kept]
        out[name] = kept
    return out
