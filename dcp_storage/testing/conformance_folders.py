"""Conformance of the listing of sub-folders. See ``conformance.py``."""

from __future__ import annotations

from collections.abc import Callable

from dcp_storage.store import Store
from dcp_storage.testing.conformance_tools import FOLDERS, put, sizes

__all__ = ["FolderConformance"]


class FolderConformance:
    """The tests of sub-folders; the fixtures are those of ``StoreConformance``."""

    def test_a_fresh_folder_has_no_folders(self, store: Store, beside: Store | None) -> None:
        """A folder that nobody has made has no sub-folders, nor one with objects, nor one beside a longer name."""
        assert store.folders() == []
        store.make_folder()
        put(store, "object", b"x")
        if beside is not None:
            beside.make_folder()
            put(beside, "object", b"x")
        assert store.folders() == []
        assert sizes(store) == {"object": 1}

    def test_folders_are_those_directly_inside(
        self, store: Store, second: Store, inside: Callable[[str], Store] | None
    ) -> None:
        """Every sub-folder that holds an object is listed once, by its name alone, past caches, and no deeper one."""
        if inside is None:
            assert store.folders() == second.folders() == []
            return
        store.make_folder()
        wanted: list[str] = []
        for number in (9, 10, 1):
            assert sorted(second.folders()) == sorted(wanted)
            made = inside(f"step-{number}")
            made.make_folder()
            for name in ("object", "another"):
                put(made, name, b"x")
            wanted.append(f"step-{number}")
        assert sorted(store.folders()) == sorted(second.folders()) == sorted(wanted)
        assert inside("step-1").folders() == []
        assert store.entries() == []

    def test_no_character_of_a_folder_is_special(
        self, store: Store, second: Store, inside: Callable[[str], Store] | None
    ) -> None:
        """Folder names with glob, URL, shell and non-ASCII characters are plain names, each its own folder."""
        names = FOLDERS if inside is not None else ()
        store.make_folder()
        for number, name in enumerate(names):
            assert inside is not None
            made = inside(name)
            made.make_folder()
            put(made, "object", bytes(number))
        assert sorted(second.folders()) == sorted(names)
        for number, name in enumerate(names):
            assert inside is not None
            assert sizes(inside(name)) == {"object": number}
