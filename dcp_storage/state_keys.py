"""The ``keys=`` of a load: which keys of a checkpoint are wanted, and what they are called in the template (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

__all__ = ["KeyChoice", "Keys"]

Keys = Iterable[str] | Mapping[str, str | None] | Callable[[str], str | None] | None
"""Prefixes to load, or prefixes with new names (None leaves out), or a function from the key on the store to the
template's (None leaves out)."""


class KeyChoice:
    """What ``keys=`` says, asked key by key.

    A prefix is a whole key or ends before a dot: ``"model"`` stands for ``model`` and ``model.…``, not for ``model2``;
    ``""`` for everything. Of several that fit, the longest counts.

    Args:
        keys: see :data:`Keys`; None takes everything as it is.

    Raises:
        TypeError: a single text, or something that is none of these.
    """

    def __init__(self, keys: Keys) -> None:
        self._rename: Callable[[str], str | None] | None = None
        self._prefixes: dict[str, str | None] | None = None
        self._only = False
        if keys is None:
            return
        if isinstance(keys, str) or not (callable(keys) or isinstance(keys, Iterable)):
            raise TypeError(f'keys must be prefixes, e.g. ["model"], a dict of prefixes, or a function, not {keys!r}.')
        if isinstance(keys, Mapping):
            pairs = dict(keys)
        elif callable(keys):
            self._rename = keys
            return
        else:
            self._only = True
            pairs = {prefix: prefix for prefix in keys}
        for old, new in pairs.items():
            if not isinstance(old, str) or not (new is None or isinstance(new, str)):
                raise TypeError(f"keys must be made of text, not {old!r}: {new!r}.")
        self._prefixes = {
            old.removesuffix("."): None if new is None else new.removesuffix(".") for old, new in pairs.items()
        }

    @property
    def by_function(self) -> bool:
        """Whether a function decides, so that only asking it key by key tells what is left out."""
        return self._rename is not None

    def name_of(self, stored: str) -> str | None:
        """What a key of the checkpoint is called in the template; None for one that is left out."""
        if self._rename is not None:
            new = self._rename(stored)
            if new is not None and not isinstance(new, str):
                raise TypeError(f"keys= must give text or None for {stored!r}, not {new!r}.")
            return new
        if self._prefixes is None:
            return stored
        prefix = self._prefix_of(stored)
        if prefix is None:
            return None if self._only else stored
        new = self._prefixes[prefix]
        if new is None:
            return None
        rest = stored[len(prefix) :] if prefix else f".{stored}"  # from a dot on, or empty
        return new + rest if new else rest.removeprefix(".")

    def leaves_out(self, key: str, dropped: Callable[[str], bool]) -> bool:
        """Whether a key of the template is one that the caller does not want filled.

        Args:
            key: of the template.
            dropped: whether all that the checkpoint has under a key was left out by :meth:`name_of`.
        """
        if self._rename is not None:
            return dropped(key)
        if self._prefixes is None:
            return False
        prefix = self._prefix_of(key)
        if prefix is None:
            # Also the way to a chosen part lies open: "model" is not left out where only "model.head" is wanted.
            return self._only and not any(chosen.startswith(f"{key}.") for chosen in self._prefixes)
        return self._prefixes[prefix] is None

    def idle(self, names: Iterable[str]) -> list[str]:
        """The chosen prefixes under which none of these keys of the template is."""
        if not self._only:
            return []
        left = {prefix for prefix in self._prefixes or () if prefix}
        for name in names:
            if not left:
                break
            left -= {prefix for prefix in left if name == prefix or name.startswith(f"{prefix}.")}
        return sorted(left)

    def _prefix_of(self, key: str) -> str | None:
        fitting = [p for p in self._prefixes or () if not p or key == p or key.startswith(f"{p}.")]
        return max(fitting, key=len, default=None)
