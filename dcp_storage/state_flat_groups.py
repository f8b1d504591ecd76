"""Hyperparameters that were saved for each parameter, as torch's ``flatten_optimizer_state_dict=True`` has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dcp_storage.state_digest import digest_of
from dcp_storage.state_findings import Wish

__all__ = ["FlatGroups"]


class FlatGroups:
    """The groups of an optimizer, taken apart: ``param_groups.<parameter>.<hyperparameter>``.

    Attributes:
        elsewhere: parameters that were saved and are not in the template.
    """

    def __init__(self) -> None:
        self.elsewhere: set[str] = set()
        self._wishes: dict[str, dict[str, Wish]] = {}

    def add(self, parameter: str, hyperparameter: str, wish: Wish) -> None:
        """Notes what is going to be loaded for a parameter."""
        self._wishes.setdefault(parameter, {})[hyperparameter] = wish

    @property
    def parameters(self) -> set[str]:
        """Those that get anything from here."""
        return set(self._wishes)

    @property
    def sources(self) -> list[str]:
        """The keys of all values on the store."""
        return [wish.source for of_one in self._wishes.values() for wish in of_one.values()]

    def are_one_group(self, names: Iterable[str], values: Mapping[str, Any]) -> bool:
        """Whether parameters had the same hyperparameters, as those of one group have.

        Args:
            names: the parameters; those that are not known here do not count.
            values: what was read of :attr:`sources`.
        """
        seen = {
            digest_of({what: values[wish.source] for what, wish in self._wishes[name].items()})
            for name in names
            if name in self._wishes
        }
        return len(seen) <= 1

    def of_group(self, names: Iterable[str]) -> dict[str, Any]:
        """The hyperparameters of a group with these parameters, after the load."""
        known = next((self._wishes[name] for name in names if name in self._wishes), {})
        return {what: wish.value for what, wish in known.items()}
