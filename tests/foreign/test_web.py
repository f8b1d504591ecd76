"""``http://``: a checkpoint is loaded from any web server, and nothing is ever written there."""

from __future__ import annotations

import errno
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_storage import CorruptCheckpointError, FsspecStorageReader, FsspecStorageWriter, LoadOptions
from dcp_storage.errors import ObjectNotFoundError, ObjectTooShortError, StoreError
from dcp_storage.store import Store
from tests.e2e import ALONE, assert_same, failure, like, load, save, small_state
from tests.foreign import opened
from tests.foreign.web import WebServer, web_server
from tests.servers.certificate import make_certificate

pytestmark = pytest.mark.filterwarnings(ALONE)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    """A server of ``tmp_path``."""
    with web_server(tmp_path) as server:
        yield server


def test_a_checkpoint_is_loaded_without_a_listing(tmp_path: Path, web: WebServer) -> None:
    """The newest of two generations is found by its name and loaded bit for bit; no folder is asked for."""
    for seed in (1, 2):
        save(small_state(seed), FsspecStorageWriter(tmp_path / "run", overwrite=True))
    assert (tmp_path / "run" / ".commit.2").exists()
    found = like(small_state())
    load(found, FsspecStorageReader(f"{web.url}/run"))
    assert_same(found, small_state(2))
    assert {path.rpartition("/")[2] for _, path in web.seen} >= {".commit", ".commit.2"}
    assert not [path for _, path in web.seen if path.rstrip("/") in ("", "/run")]


def test_a_checkpoint_is_loaded_over_tls(tmp_path: Path) -> None:
    """``https://`` with the authority that the user names is loaded bit for bit; without it the load is refused."""
    certificate = make_certificate(tmp_path)
    save(small_state(3), FsspecStorageWriter(tmp_path / "run"))
    context = ssl.create_default_context(cafile=str(certificate))
    with web_server(tmp_path, certificate) as web:
        found = like(small_state())
        load(found, FsspecStorageReader(f"{web.url}/run", storage_options={"ssl": context}))
        assert_same(found, small_state(3))
        stranger = FsspecStorageReader(f"{web.url}/run", options=LoadOptions(attempts=2))
        assert not failure(StoreError, lambda: load(found, stranger)).transient


def test_a_short_file_is_found_before_anything_is_loaded(tmp_path: Path, web: WebServer) -> None:
    """Without a listing each file is asked for its size, and a short one is named."""
    save(small_state(1), FsspecStorageWriter(tmp_path / "run"))
    shard = next((tmp_path / "run").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    found = like(small_state())
    error = failure(CorruptCheckpointError, lambda: load(found, FsspecStorageReader(f"{web.url}/run")))
    assert error.file == shard.name
    assert_same(found, like(small_state()))


@pytest.mark.parametrize(("status", "transient"), [(503, True), (429, True), (403, False)])
def test_an_outage_is_no_missing_checkpoint(tmp_path: Path, web: WebServer, status: int, transient: bool) -> None:
    """A failed look at a web server, which fsspec calls "not found" whatever it was, is told as what it was."""
    save(small_state(1), FsspecStorageWriter(tmp_path / "run"))
    web.broken[".commit"] = status
    reader = FsspecStorageReader(f"{web.url}/run", options=LoadOptions(attempts=1))
    error = failure(StoreError, lambda: load(like(small_state()), reader))
    assert error.transient is transient
    with opened(f"{web.url}/run") as store:
        with pytest.raises(StoreError) as caught:
            store.size(".commit")
        assert not isinstance(caught.value, ObjectNotFoundError)
        with pytest.raises(ObjectNotFoundError):
            store.size("missing")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("{url}/run", {"no_such_option": 1}),
        ("http:///run", {}),
        ("http://127.0.0.1:99999/run", {}),
    ],
)
def test_a_request_that_cannot_be_made_is_no_missing_checkpoint(
    tmp_path: Path, web: WebServer, url: str, options: dict[str, Any]
) -> None:
    """Options and URLs that nothing can be asked with are told as that, at once; the checkpoint is there."""
    save(small_state(1), FsspecStorageWriter(tmp_path / "run"))
    reader = FsspecStorageReader(url.format(url=web.url), storage_options=options)
    error = failure(StoreError, lambda: load(like(small_state()), reader))
    assert not isinstance(error, ObjectNotFoundError)
    assert not error.transient


def test_ranges_of_a_server_that_knows_none(tmp_path: Path, web: WebServer) -> None:
    """A server that sends the whole for a part gives the right bytes all the same, and its end is noticed."""
    data = bytes(range(200))
    (tmp_path / "object").write_bytes(data)
    with opened(f"{web.url}/.") as store:
        target = bytearray(30)
        store.read_into("object", 100, [memoryview(target)[:10], memoryview(target)[10:]])
        assert target == data[100:130]
        with pytest.raises(ObjectTooShortError):
            store.read_into("object", 190, [memoryview(bytearray(11))])


def test_a_save_is_refused_with_a_sentence(tmp_path: Path, web: WebServer) -> None:
    """A save to a web server fails before any request, and says that it can only be read."""
    error = failure(StoreError, lambda: save(small_state(1), FsspecStorageWriter(f"{web.url}/run")))
    assert error.errno == errno.EROFS
    assert "http:// can only be read" in str(error)
    assert (web.seen, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.make_folder(),
        lambda store: store.put("a", [memoryview(b"1")]),
        lambda store: store.create("a", b"1"),
        lambda store: store.upload("a"),
        lambda store: store.delete(["a"]),
    ],
)
def test_no_method_writes(web: WebServer, call: Callable[[Store], object]) -> None:
    """Every method that would change something raises EROFS and sends nothing."""
    with opened(f"{web.url}/run") as store:
        with pytest.raises(StoreError) as caught:
            call(store)
        assert (caught.value.errno, caught.value.transient, web.seen) == (errno.EROFS, False, [])
