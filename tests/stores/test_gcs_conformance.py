"""The GCS store against the conformance suite, on the strict server and on fake-gcs-server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dcp_storage.store import Store
from dcp_storage.testing.conformance import StoreConformance
from tests.servers.fake_gcs import FakeGcs, fake_gcs_server
from tests.servers.gcs import GcsServer, gcs_server
from tests.servers.gcs_folder import GcsFolder


@pytest.fixture(scope="module")
def strict() -> Iterator[GcsServer]:
    """One strict server for the module."""
    with gcs_server() as server:
        yield server


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    """One fake-gcs-server for the module."""
    with fake_gcs_server(tmp_path_factory.mktemp("fake-gcs") / "log") as server:
        yield server


class _OnGcs(StoreConformance):
    uploads_last = True

    @pytest.fixture
    def folder(self) -> GcsFolder:
        raise AssertionError("each class has its own")

    @pytest.fixture
    def store(self, folder: GcsFolder) -> Iterator[Store]:
        store = folder.open()
        yield store
        assert store.open_uploads() == []
        store.close()

    @pytest.fixture
    def second(self, folder: GcsFolder, store: Store) -> Store:
        return folder.open(client=2)

    @pytest.fixture
    def below(self, folder: GcsFolder) -> Store:
        return folder.at(f"{folder.key}/sub").open()

    @pytest.fixture
    def inside(self, folder: GcsFolder) -> Callable[[str], Store]:
        return lambda name: folder.at(f"{folder.key}/{name}").open()

    @pytest.fixture
    def beside(self, folder: GcsFolder) -> Store:
        return folder.at(f"{folder.key}0").open()


class TestStrict(_OnGcs):
    @pytest.fixture
    def folder(self, strict: GcsServer) -> GcsFolder:
        return GcsFolder.new(strict, "run [1]/step-1")


class TestFake(_OnGcs):
    @pytest.fixture
    def folder(self, fake: FakeGcs) -> GcsFolder:
        return GcsFolder.new(fake, "run [1]/step-1")
