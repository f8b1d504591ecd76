"""The whole life of a checkpoint on an independent GCS server and in buckets that keep versions."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_storage import CheckpointExistsError, NotCommittedError
from dcp_storage.fence import delete_folder, prune_folder
from tests.e2e import ALONE, Place, assert_same, failure, like, load, save, small_state
from tests.foreign import opened, place_on

pytestmark = pytest.mark.filterwarnings(ALONE)

SLOW = (pytest.mark.slow, pytest.mark.timeout(300))


@pytest.fixture(
    params=["fake_gcs", "ministack versioned", pytest.param("seaweedfs versioned", marks=SLOW)],
)
def place(request: pytest.FixtureRequest) -> Place:
    """A folder for a checkpoint."""
    kind, _, versioned = request.param.partition(" ")
    made = place_on(request, kind)
    if versioned:
        assert made.server is not None
        made.server.client.put_bucket_versioning(
            Bucket=made.url.split("/")[2], VersioningConfiguration={"Status": "Enabled"}
        )
    return made


def _names(place: Place) -> list[str]:
    with opened(place.url, place.options) as store:
        return sorted(entry.name for entry in store.entries())


def _loaded(place: Place) -> Any:
    found = like(small_state())
    load(found, place.reader())
    return found


def test_saved_replaced_deleted_saved_again(place: Place) -> None:
    """A save is plain and committed atomically, a second is refused, an overwrite replaces it, a delete ends it, and
    what is gone does not come back: neither to a reader nor to a listing.
    """
    writer = place.writer()
    save(small_state(1), writer)
    assert writer.report is not None
    assert not writer.report.single_writer
    assert _names(place) == [".commit", ".manifest", ".metadata", "__0_0.distcp"]
    failure(CheckpointExistsError, lambda: save(small_state(2), place.writer()))
    assert_same(_loaded(place), small_state(1))
    save(small_state(3), place.writer(overwrite=True))
    assert_same(_loaded(place), small_state(3))
    assert ".manifest" not in _names(place)
    with opened(place.url, place.options) as store:
        delete_folder(store)
        failure(NotCommittedError, lambda: _loaded(place))
        prune_folder(store, grace=0)
        assert all(name.startswith(".commit") for name in _names(place))
        assert store.open_uploads() == []
    save(small_state(4), place.writer())
    assert_same(_loaded(place), small_state(4))
