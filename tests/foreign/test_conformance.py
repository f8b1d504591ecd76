"""The conformance suite on filesystems that nobody wrote a store for."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dcp_storage.errors import StoreError
from dcp_storage.store import Store
from dcp_storage.testing.conformance import StoreConformance
from dcp_storage.testing.conformance_tools import at_once, noise, put, read
from tests.foreign import opened
from tests.servers.azurite import Azurite
from tests.servers.ftp import FtpServer

Open = Callable[[str], Store]


@pytest.fixture
def keep() -> Iterator[contextlib.ExitStack]:
    """Closes what a test opened."""
    with contextlib.ExitStack() as stack:
        yield stack


class At(StoreConformance):
    """The suite on a URL to which a suffix is added for the folders below and beside."""

    @pytest.fixture
    def url(self) -> str:
        raise AssertionError("each class has its own")

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        return {}

    @pytest.fixture
    def open_at(self, keep: contextlib.ExitStack, url: str, options: Mapping[str, Any]) -> Open:
        return lambda suffix: keep.enter_context(opened(url + suffix, options))

    @pytest.fixture
    def store(self, open_at: Open) -> Store:
        return open_at("")

    @pytest.fixture
    def second(self, open_at: Open) -> Store:
        return open_at("")

    @pytest.fixture
    def below(self, open_at: Open) -> Store:
        return open_at("/below")

    @pytest.fixture
    def inside(self, open_at: Open) -> Callable[[str], Store]:
        return lambda name: open_at(f"/{name}")

    @pytest.fixture
    def beside(self, open_at: Open) -> Store:
        return open_at("x")


class WithFolders(At):
    @pytest.fixture
    def store(self, open_at: Open) -> Store:
        """Folders are real here: a save makes its own first, as this does."""
        store = open_at("")
        store.make_folder()
        return store


class TestDir(WithFolders):
    """``dir://`` over a local folder."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"dir::file://{tmp_path}/run"


class TestFtp(WithFolders):
    """``ftp://``, through fsspec's own FTPFileSystem."""

    @pytest.fixture
    def url(self, ftp: FtpServer) -> str:
        return f"{ftp.url}/{secrets.token_hex(6)}/run"

    @pytest.fixture
    def options(self, ftp: FtpServer) -> Mapping[str, Any]:
        return ftp.storage_options

    def test_readers_see_the_old_or_the_new(self, store: Store, second: Store) -> None:
        """Not promised here, as a read is several requests; once the replacing is over, reads have the last body."""
        bodies = [noise(50_000, 1), noise(70_001, 2)]
        put(store, "object", bodies[0])

        def write() -> object:
            for number in range(10):
                put(store, "object", bodies[number % 2])
            return None

        def look() -> object:
            return {len(read(second, "object")) <= 70_001 for _ in range(10)}

        written, looked = at_once([write, look])
        assert written is None
        assert looked == {True} or isinstance(looked, StoreError)
        assert read(second, "object") == read(store, "object") == bodies[1]


@pytest.mark.slow
class TestAzure(At):
    """``az://``, through adlfs on Azurite."""

    @pytest.fixture
    def url(self, azurite: Azurite) -> str:
        container = f"container-{secrets.token_hex(6)}"
        azurite.make_container(container)
        return f"az://{container}/run"

    @pytest.fixture
    def options(self, azurite: Azurite) -> Mapping[str, Any]:
        return azurite.storage_options
