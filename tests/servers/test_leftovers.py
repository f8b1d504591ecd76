"""The check that no test leaves an upload open: it sees all three kinds, and lets only those off that say so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers.endpoint import S3Endpoint
from tests.servers.gcs import GcsServer
from tests.servers.gcs_folder import GcsFolder
from tests.servers.leftovers import open_on_gcs, open_on_s3

ROOT = Path(__file__).parents[2]

CONFTEST = """
from tests.conftest import bucket, moto, pytest_configure, strict
"""

TESTS = """
import urllib.request

import pytest

from tests.servers.gcs_folder import GcsFolder

def begin(moto, bucket):
    moto.client.create_multipart_upload(Bucket=bucket(moto), Key="run/a")

def test_s3(moto, bucket):
    begin(moto, bucket)

def test_s3_that_fails(moto, bucket):
    begin(moto, bucket)
    raise OSError

@pytest.mark.leaves_uploads("on purpose")
def test_s3_that_says_so(moto, bucket):
    begin(moto, bucket)

def test_gcs_part(strict):
    GcsFolder.new(strict).open().upload("a").write_part(1, 0, [memoryview(b"1")])

def test_gcs_session(strict):
    folder = GcsFolder.new(strict)
    url = f"{strict.url}/upload/storage/v1/b/{folder.bucket}/o?uploadType=resumable&name=a"
    urllib.request.urlopen(url, data=b"{}", timeout=10).close()

def test_the_next(moto, bucket, strict):
    bucket(moto)
"""


def test_what_is_open_is_seen_until_it_ends(
    moto: S3Endpoint, strict: GcsServer, bucket: Callable[[S3Endpoint], str]
) -> None:
    """A multipart upload and a part are listed with their names while they are open, and not after an abort."""
    name = bucket(moto)
    begun = moto.client.create_multipart_upload(Bucket=name, Key="run/a")
    assert open_on_s3(moto, name) == [f"moto: upload {begun['UploadId']} of {name}/run/a"]
    moto.client.abort_multipart_upload(Bucket=name, Key="run/a", UploadId=begun["UploadId"])
    assert open_on_s3(moto, name) == []

    folder = GcsFolder.new(strict)
    upload = folder.open().upload("b")
    upload.write_part(1, 0, [memoryview(b"1")])
    (text,) = [one for one in open_on_gcs(strict) if folder.bucket in one]
    assert text.startswith(f"strict: part of {folder.bucket}/run/step-1/b.")
    upload.complete()
    assert [one for one in open_on_gcs(strict) if folder.bucket in one] == []


@pytest.mark.slow
def test_the_test_that_left_something_fails(tmp_path: Path) -> None:
    """Each test that leaves one gets an error of its own, also one that failed anyway; one that says so does not."""
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-rE", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    wrong = re.findall(r"^ERROR test_it\.py::(\w+) - AssertionError", ended.stdout, re.MULTILINE)
    assert wrong == ["test_s3", "test_s3_that_fails", "test_gcs_part", "test_gcs_session"], ended.stdout
    assert re.search(r"^1 failed, 5 passed, 4 errors", ended.stdout, re.MULTILINE), ended.stdout
