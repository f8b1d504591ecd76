"""What ftp hides, and what is made of it: one connection, lost connections, refused listings, patterns."""

from __future__ import annotations

import ftplib
import secrets
from pathlib import Path
from typing import Any

import pytest

from dcp_storage.errors import StoreError
from dcp_storage.stores.location import parse_location
from dcp_storage.stores.opening import open_store
from tests.foreign import opened
from tests.servers.ftp import FtpServer, ftp_server


@pytest.fixture
def folder(ftp: FtpServer) -> str:
    """A folder on the server that holds one object."""
    name = secrets.token_hex(6)
    (ftp.root / name).mkdir()
    (ftp.root / name / "object").write_bytes(b"12345")
    return name


def test_a_lost_connection_is_made_again(tmp_path: Path) -> None:
    """While the server is away every call raises a transient error; when it is back the same store works on."""
    (tmp_path / "root").mkdir()
    with ftp_server(tmp_path / "root", tmp_path / "log") as server:
        folder = open_store(parse_location(f"{server.url}/run"), server.storage_options)
        folder.make_folder()
        folder.put("a", [memoryview(b"1")])
        upload = folder.upload("b")
        upload.write_part(1, 0, [memoryview(b"1")])
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            folder.put("c", [memoryview(b"1")])
        assert caught.value.transient
    with ftp_server(tmp_path / "root", tmp_path / "log", server.port):
        upload.write_part(2, 1, [memoryview(b"2")])
        upload.complete()
        assert folder.read("b", limit=10) == b"12"
        assert {entry.name for entry in folder.entries()} >= {"a", "b"}


@pytest.mark.parametrize("error", [ftplib.error_temp("426 cut"), ftplib.error_perm("550 refused")])
def test_a_listing_that_failed_is_not_empty(
    ftp: FtpServer, folder: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A listing that was cut or refused, of which fsspec makes an empty list, raises."""
    real_mlsd, real_dir = ftplib.FTP.mlsd, ftplib.FTP.dir

    def mlsd(self: ftplib.FTP, path: str = "", **more: Any) -> Any:
        if path.strip("/") == folder:
            raise error
        return real_mlsd(self, path, **more)

    def listed(self: ftplib.FTP, *arguments: Any) -> None:
        if arguments[0].strip("/") == folder:
            raise error
        real_dir(self, *arguments)

    with opened(f"{ftp.url}/{folder}", ftp.storage_options) as store:
        assert [entry.name for entry in store.entries()] == ["object"]
        with monkeypatch.context() as patched:
            patched.setattr(ftplib.FTP, "mlsd", mlsd)
            patched.setattr(ftplib.FTP, "dir", listed)
            with pytest.raises(StoreError):
                store.entries()
        assert [entry.name for entry in store.entries()] == ["object"]
        store.delete(["object"])
        assert store.entries() == []


def test_a_delete_that_is_refused_raises(ftp: FtpServer, folder: str) -> None:
    """Of "not there" and "not allowed", for which ftp has one number, only the first is no error."""
    (ftp.root / folder / "below").mkdir()
    with opened(f"{ftp.url}/{folder}", ftp.storage_options) as store:
        with pytest.raises(StoreError):
            store.delete(["missing", "below", "object"])
        assert sorted(path.name for path in (ftp.root / folder).iterdir()) == ["below"]


def test_an_abort_expands_no_pattern(ftp: FtpServer) -> None:
    """Giving up an upload in a folder named like a pattern leaves the folder that the pattern matches alone."""
    base = secrets.token_hex(6)
    for name in (f"{base} 1", f"{base} [1]"):
        (ftp.root / name).mkdir()
    (ftp.root / f"{base} 1" / "object").write_bytes(b"another's")
    with opened(f"{ftp.url}/{base} [1]", ftp.storage_options) as store:
        upload = store.upload("object")
        upload.write_part(1, 0, [memoryview(bytes(70_000))])
        upload.write_part(2, 70_000, [memoryview(b"x")])
        upload.abort()
        assert store.entries() == []
    assert (ftp.root / f"{base} 1" / "object").read_bytes() == b"another's"
