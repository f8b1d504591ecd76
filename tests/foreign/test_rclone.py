"""``rclone serve s3``, which takes conditional writes and ignores the condition: found out, said, and used by one."""

from __future__ import annotations

import pytest

from dcp_storage.errors import ObjectExistsError, StoreError
from dcp_storage.store import Atomicity
from tests.e2e import ALONE, Place
from tests.foreign import opened, place_on
from tests.foreign.test_checkpoints import test_a_second_step_beside_the_first, test_what_one_writer_can_do

__all__ = ["test_a_second_step_beside_the_first", "test_what_one_writer_can_do"]  # both run here on rclone

pytestmark = [pytest.mark.filterwarnings(ALONE), pytest.mark.slow]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """A folder for a checkpoint."""
    return place_on(request, "rclone")


def test_the_probe_finds_it_out(place: Place) -> None:
    """The second create of a scratch object succeeds, so the store says NONE; a create still looks first."""
    assert place.server is not None
    bucket = place.url.split("/")[2]
    for _ in range(2):  # the server itself: the condition means nothing to it
        place.server.client.put_object(Bucket=bucket, Key="other/taken", Body=b"x", IfNoneMatch="*")
    with opened(place.url, place.options) as store:
        assert store.create_if_absent is Atomicity.NONE
        assert store.entries() == []
        store.create("a", b"first")
        with pytest.raises(ObjectExistsError):
            store.create("a", b"second")
        assert store.read("a", limit=10) == b"first"


def test_what_else_it_does_not_do(place: Place) -> None:
    """What no single save needs fails in the open: no part is replaced in silence. Uploads are listed, in its way."""
    with opened(place.url, place.options) as store:
        assert store.open_uploads() == []
        upload = store.upload("object")
        upload.write_part(1, 0, [memoryview(b"first")])
        assert [e.name for e in store.open_uploads()] == ["object"]
        with pytest.raises(StoreError) as caught:
            upload.write_part(1, 0, [memoryview(b"other")])
        assert caught.value.transient is False
        upload.complete()
        assert store.read("object", limit=10) == b"first"
