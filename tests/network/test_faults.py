"""Over a link that breaks, saves and loads finish where they can, else raise in time and say what failed."""

from __future__ import annotations

import errno
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException

from dcp_storage import CheckpointError, FsspecStorageReader, StoreError
from dcp_storage.testing.proxy import Fault, Shape
from tests.e2e import ALONE, assert_same, assert_sentence, failures_of, load, place_of
from tests.network import STORES, Link, each_once, link_to, seconds, state_of, zeros_like
from tests.servers.faulty_http import faulty_http

pytestmark = pytest.mark.filterwarnings(ALONE)

PASSING: dict[str, dict[str, Any]] = {
    "reset before": {},
    "reset after": {},
    "cut request": {},
    "cut answer": {},
    "503": {"status": 503},
    "500": {"status": 500, "body": b"<Error><Code>InternalError</Code></Error>"},
    "429": {"status": 429, "body": b""},
}
LASTING = ("reset before", "reset after", "503", "black hole")


def fault(name: str, matches: Callable[[str, str], bool], times: int = -1) -> Fault:
    """A fault by its name here."""
    if name.isdigit():
        return Fault("status", matches, times, **PASSING[name])
    return Fault(name, matches, times)  # type: ignore[arg-type]


def is_write(method: str, target: str) -> bool:
    """Whether a request writes an object or a part of one; the removal of what failed goes through."""
    return method in ("PUT", "POST") and "delete" not in target


def is_shard_write(method: str, target: str) -> bool:
    """Whether a request writes a shard or a part of one."""
    return is_write(method, target) and "distcp" in target


def is_shard_read(method: str, target: str) -> bool:
    """Whether a request reads a shard."""
    return method == "GET" and "distcp" in target


def error_of(call: Callable[[], object]) -> CheckpointError:
    """What a save or load in this process alone raised, which must be one of ours and say a sentence."""
    with pytest.raises(CheckpointException) as caught:
        call()
    error = failures_of(caught.value)[0]
    assert isinstance(error, CheckpointError), repr(error)
    assert_sentence(str(error))
    return error


def assert_holds(link: Link, state: dict[str, Any]) -> None:
    """Another reader, on another way to the store, finds exactly this state."""
    found = zeros_like(state)
    load(found, FsspecStorageReader(link.place.url, storage_options=link.place.options))
    assert_same(found, state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("name", PASSING)
def test_every_request_fails_once(request: pytest.FixtureRequest, kind: str, name: str) -> None:
    """Each request of a save, then of a load, is struck the first time it comes: both finish, and nothing is left."""
    state = state_of()
    with link_to(request, kind) as link:
        struck = name if not name.isdigit() else "status"
        link.proxy.faults = [each_once(struck, **PASSING[name])]
        writer = link.save(state)
        assert writer.report is not None
        assert writer.report.retries > 0
        assert_holds(link, state)
        assert link.left() == []
        link.proxy.faults = [each_once(struck, **PASSING[name])]
        found = zeros_like(state)
        reader = link.load(found)
        assert_same(found, state)
        assert reader.report is not None
        assert reader.report.retries > 0


@pytest.mark.parametrize("kind", STORES)
def test_parts_and_ranges_that_fail_once(request: pytest.FixtureRequest, kind: str) -> None:
    """A part whose reply is lost and a range that is cut are asked for again, and what was saved is loaded."""
    state = state_of()
    with link_to(request, kind) as link:
        link.proxy.faults = [Fault("reset after", is_write, 3)]
        link.save(state)
        link.proxy.faults = [Fault("cut answer", is_shard_read, 2)]
        found = zeros_like(state)
        link.load(found)
        assert_same(found, state)
        assert link.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("name", LASTING)
def test_writes_that_always_fail(request: pytest.FixtureRequest, kind: str, name: str) -> None:
    """A save that cannot write ends in time with operation, key and attempts; the checkpoint before it stands."""
    old = state_of(1)
    with link_to(request, kind) as link:
        link.save(old)
        link.proxy.faults = [fault(name, is_shard_write)]
        errors: list[CheckpointError] = []
        took = seconds(lambda: errors.append(error_of(lambda: link.save(state_of(2), attempts=3, deadline=4.0))))
        assert took < 30
        (error,) = errors
        assert isinstance(error, StoreError)
        assert error.operation
        assert error.key
        assert error.attempts == (1 if name == "black hole" else 3)
        link.proxy.faults = []
        assert_holds(link, old)
        assert link.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("name", LASTING)
def test_reads_that_always_fail(request: pytest.FixtureRequest, kind: str, name: str) -> None:
    """A load that cannot read a shard ends in time with operation, key and attempts, and reports nothing loaded."""
    state = state_of()
    with link_to(request, kind) as link:
        link.save(state)
        link.proxy.faults = [fault(name, is_shard_read)]
        errors: list[CheckpointError] = []
        took = seconds(lambda: errors.append(error_of(lambda: link.load(zeros_like(state), attempts=3, deadline=4.0))))
        assert took < 30
        (error,) = errors
        assert isinstance(error, StoreError)
        assert error.operation == "read_into"
        assert ".distcp" in str(error.key)
        assert error.attempts == (1 if name == "black hole" else 3)


@pytest.mark.parametrize("kind", STORES)
def test_silence_is_not_waited_out(request: pytest.FixtureRequest, kind: str) -> None:
    """A request that is never answered, and a body that just stops, are given up after the silence and made again."""
    state = state_of()
    with link_to(request, kind, silence=0.7) as link:
        link.proxy.faults = [Fault("black hole", is_write)]
        link.save(state)
        link.proxy.faults = [Fault("short answer", is_shard_read), Fault("black hole", is_shard_read)]
        found = zeros_like(state)
        link.load(found)
        assert_same(found, state)


def break_for_a_second(link: Link) -> None:
    """Lets nothing through for that time."""
    link.proxy.faults = [Fault("reset before", times=-1)]
    time.sleep(1)
    link.proxy.faults = []


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
def test_an_outage_of_a_second(request: pytest.FixtureRequest, kind: str) -> None:
    """Nothing gets through for a second in the middle of a save and of a load: both go on afterwards."""
    state = state_of()
    with link_to(request, kind) as link:
        for action in (lambda: link.save(state, attempts=14), lambda: link.load(zeros_like(state), attempts=14)):
            link.proxy.shape = Shape(latency=0.02)
            outage = threading.Timer(0.15, break_for_a_second, (link,))
            outage.start()
            try:
                action()
            finally:
                outage.join()
        assert_holds(link, state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
def test_a_slow_link(request: pytest.FixtureRequest, kind: str) -> None:
    """200 ms for each request and 2 MB/s for each connection slow a save and a load down, and break nothing."""
    state = state_of()
    with link_to(request, kind) as link:
        link.proxy.shape = Shape(latency=0.2, rate=2e6)
        link.save(state)
        found = zeros_like(state)
        link.load(found)
        assert_same(found, state)


def test_no_server(request: pytest.FixtureRequest) -> None:
    """A store that is not there is an error in bounded time, for a save as for a load, and never an empty folder."""
    with link_to(request, "ministack") as link:
        link.proxy.close()
        for action in (
            lambda: link.save(state_of(), attempts=2),
            lambda: link.load(zeros_like(state_of()), attempts=2),
        ):
            error = error_of(action)
            assert type(error) is StoreError
            assert error.attempts == 2


EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


def test_a_token_that_has_just_expired(request: pytest.FixtureRequest) -> None:
    """Requests refused for an expired token are made again; where that does not end, the error says so."""
    state = state_of()
    with link_to(request, "ministack") as link:
        link.proxy.faults = [Fault("status", times=3, status=400, body=EXPIRED)]
        link.save(state)
        assert_holds(link, state)
        link.proxy.faults = [Fault("status", times=-1, status=400, body=EXPIRED)]
        error = error_of(lambda: link.load(zeros_like(state), attempts=3))
        assert isinstance(error, StoreError)
        assert (error.errno, error.attempts) == (errno.EACCES, 3)


ISSUER = """
import datetime, json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text()) + 1
count.write_text(str(number))
if number > int(sys.argv[2]):
    sys.exit("no more")
soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=1)
print(json.dumps({"Version": 1, "AccessKeyId": f"KEY{number}", "SecretAccessKey": "s", "SessionToken": "t",
                  "Expiration": soon.isoformat()}))
"""


def issued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> dict[str, str]:
    """Credentials of a second's life, from a program that gives ``most`` of them: a profile of that kind."""
    count, program, config = (tmp_path / name for name in ("count", "issuer.py", "config"))
    count.write_text("0")
    program.write_text(ISSUER)
    command = f"{sys.executable} {program} {count} {most}"
    config.write_text(f"[profile renewed]\ncredential_process = {command}\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    return {"profile": "renewed"}


@pytest.mark.slow
def test_credentials_are_renewed_while_a_save_goes_on(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials that live for a second are renewed by s3fs's own means, in the middle of a save."""
    place = place_of(request, "ministack")
    assert place.server is not None
    state = state_of()
    with faulty_http(place.server.endpoint_url) as proxy:
        known = place.server.behind(proxy.url).storage_options["client_kwargs"]
        options = {**issued(tmp_path, monkeypatch, 1000), "client_kwargs": known}
        link = Link(place, proxy, options)  # type: ignore[arg-type]  # another proxy, which keeps headers
        link.save(state)
        keys = {
            part.partition("Credential=")[2].partition("/")[0]
            for headers in proxy.headers
            if "Credential=" in (part := headers.get("authorization", ""))
        }
    assert len(keys) > 1
    assert_holds(link, state)


@pytest.mark.slow
def test_credentials_that_cannot_be_renewed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no new credentials are to be had, the save says so at once and commits nothing."""
    with link_to(request, "ministack") as link:
        link.options = {**issued(tmp_path, monkeypatch, 1), "client_kwargs": link.options["client_kwargs"]}
        error = error_of(lambda: link.save(state_of()))
        assert isinstance(error, StoreError)
        assert error.errno == errno.EACCES
        assert not [name for name in link.place.files() if name.startswith(".commit")]
        assert json.loads((tmp_path / "count").read_text()) >= 2
