"""The conformance suite on the in-memory store and on every wrapper, and stores that it must catch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from dcp_storage.errors import StoreError
from dcp_storage.store import Store
from dcp_storage.testing.conformance import StoreConformance
from dcp_storage.testing.dictstore import DictStore
from dcp_storage.testing.faulty import FailingListing, FaultyStore, IgnoresIfAbsent, StaleListing
from dcp_storage.testing.recording import RecordingStore
from dcp_storage.wrappers import LimitedStore, RetryingStore

from .broken import (
    AbortForgetsToLook,
    AbortsAllUploads,
    AppendsParts,
    Caches,
    CompletesOnce,
    CreatesInPlace,
    Decodes,
    DeleteStops,
    FillsFirstBufferOnly,
    FolderCache,
    FoldersByPrefix,
    FoldersQuoted,
    FoldersTwice,
    Globs,
    IgnoresLimit,
    KeepsBuffers,
    LeavesScratch,
    LeavesTheFolder,
    LeavesUploadOpen,
    ListsNoUploads,
    ListsOnePage,
    ListsSubfolders,
    LooksThenWrites,
    LosesLastPart,
    MissingIsEmpty,
    NamelessErrors,
    NotFresh,
    OtherClock,
    PublishesOnAbort,
    PutsInPlace,
    PutsOnce,
    RefusesCrc,
    RefusesEmpty,
    RetriesNotFound,
    SharesState,
    ShortReads,
    TakesFewBuffers,
    TakesOneBuffer,
    VisibleParts,
)


class OnDict(StoreConformance):
    uploads_last = True

    @pytest.fixture
    def plain(self) -> DictStore:
        return DictStore(folder="run/step-1", min_part_size=2000)

    @pytest.fixture
    def store(self, plain: DictStore) -> Store:
        return plain

    @pytest.fixture
    def second(self, plain: DictStore) -> Store:
        return DictStore(plain.objects, folder=plain.folder, min_part_size=2000)

    @pytest.fixture
    def below(self, plain: DictStore) -> Store:
        return DictStore(plain.objects, folder=f"{plain.folder}/below")

    @pytest.fixture
    def inside(self, plain: DictStore) -> Callable[[str], Store]:
        return lambda name: DictStore(plain.objects, folder=f"{plain.folder}/{name}")

    @pytest.fixture
    def beside(self, plain: DictStore) -> Store:
        return DictStore(plain.objects, folder=f"{plain.folder}0")


class TestDictStore(OnDict):
    pass


class TestRetryingStore(OnDict):
    @pytest.fixture
    def store(self, plain: DictStore) -> Store:
        return RetryingStore(plain)


class TestLimitedStore(OnDict):
    @pytest.fixture
    def store(self, plain: DictStore) -> Store:
        return LimitedStore(plain, 3)


class TestRecordingStore(OnDict):
    @pytest.fixture
    def store(self, plain: DictStore) -> Store:
        return RecordingStore(plain)


class TestFaultyStore(OnDict):
    @pytest.fixture
    def store(self, plain: DictStore) -> Store:
        return FaultyStore(plain, [])


class TestRetryingLimitedStore(OnDict):
    """In the order that the package uses."""

    @pytest.fixture
    def store(self, plain: DictStore) -> Store:
        return RetryingStore(LimitedStore(plain, 4))


@dataclass(frozen=True)
class Broken:
    """A store and the test that must catch it."""

    make: Callable[[DictStore], Store]
    test: str


BROKEN = (
    Broken(NotFresh, "a_fresh_folder_is_empty"),
    Broken(TakesFewBuffers, "thousands_of_buffers_are_one_request"),
    Broken(PutsOnce, "a_put_replaces"),
    Broken(PutsInPlace, "readers_see_the_old_or_the_new"),
    Broken(Decodes, "no_character_is_special"),
    Broken(Decodes, "special_names_are_created_uploaded_and_deleted"),
    Broken(Globs, "special_names_are_created_uploaded_and_deleted"),
    Broken(ShortReads, "a_range_beyond_the_end_raises"),
    Broken(ShortReads, "errors_say_what_failed_and_travel"),
    Broken(FillsFirstBufferOnly, "ranges_fill_their_buffers_only"),
    Broken(RefusesEmpty, "ranges_fill_their_buffers_only"),
    Broken(RefusesEmpty, "an_empty_object_is_an_object"),
    Broken(IgnoresLimit, "reading_keeps_to_the_limit"),
    Broken(MissingIsEmpty, "what_is_not_there_is_not_found"),
    Broken(Caches, "nothing_is_answered_from_a_cache"),
    Broken(Caches, "a_put_replaces"),
    Broken(StaleListing, "a_listing_is_whole"),
    Broken(FailingListing, "a_fresh_folder_is_empty"),
    Broken(ListsOnePage, "a_listing_is_whole"),
    Broken(OtherClock, "a_listing_is_whole"),
    Broken(OtherClock, "the_clock_is_that_of_the_entries"),
    Broken(LeavesScratch, "the_clock_is_that_of_the_entries"),
    Broken(FoldersTwice, "folders_are_those_directly_inside"),
    Broken(FoldersByPrefix, "a_fresh_folder_has_no_folders"),
    Broken(FolderCache, "folders_are_those_directly_inside"),
    Broken(FoldersQuoted, "no_character_of_a_folder_is_special"),
    Broken(StaleListing, "folders_are_those_directly_inside"),
    Broken(ListsSubfolders, "other_folders_are_left_out"),
    Broken(LeavesTheFolder, "names_that_leave_the_folder_are_refused"),
    Broken(KeepsBuffers, "buffers_are_not_kept"),
    Broken(RefusesCrc, "the_right_crc_is_accepted"),
    Broken(IgnoresIfAbsent, "a_create_writes_once"),
    Broken(IgnoresIfAbsent, "racing_creates_have_one_winner"),
    Broken(LooksThenWrites, "racing_creates_have_one_winner"),
    Broken(CreatesInPlace, "a_created_object_is_seen_whole_or_not_at_all"),
    Broken(LosesLastPart, "an_upload_is_the_sum_of_its_parts"),
    Broken(AppendsParts, "parts_are_sent_at_once_and_in_any_order"),
    Broken(AppendsParts, "a_part_sent_again_replaces"),
    Broken(VisibleParts, "an_upload_is_invisible_before_it_completes"),
    Broken(PublishesOnAbort, "an_aborted_upload_leaves_nothing"),
    Broken(LeavesUploadOpen, "an_aborted_upload_leaves_nothing"),
    Broken(CompletesOnce, "completing_again_is_fine"),
    Broken(AbortForgetsToLook, "an_abort_after_complete_leaves_nothing"),
    Broken(ListsNoUploads, "open_uploads_are_listed_and_aborted_by_name"),
    Broken(AbortsAllUploads, "open_uploads_are_listed_and_aborted_by_name"),
    Broken(DeleteStops, "a_delete_removes_what_is_there"),
    Broken(NamelessErrors, "errors_say_what_failed_and_travel"),
    Broken(RetriesNotFound, "errors_say_what_failed_and_travel"),
    Broken(SharesState, "many_threads_do_not_mix"),
    Broken(TakesOneBuffer, "what_is_put_is_read"),
)


def names_of_tests() -> set[str]:
    return {name for name in dir(StoreConformance) if name.startswith("test_")}


def run(test: str, inner: DictStore, store: Store) -> None:
    method = getattr(OnDict(), test)
    offered: dict[str, Any] = {
        "store": store,
        "second": store,
        "below": DictStore(inner.objects, folder=f"{inner.folder}/below"),
        "inside": lambda name: DictStore(inner.objects, folder=f"{inner.folder}/{name}"),
        "beside": DictStore(inner.objects, folder=f"{inner.folder}0"),
        "name": "../a",
    }
    method(**{name: offered[name] for name in inspect.signature(method).parameters})


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: f"{broken.make.__name__}-{broken.test}")
def test_broken_stores_are_caught(broken: Broken) -> None:
    """A store with this fault fails this test, which the sound store passes."""
    sound = DictStore()
    run(f"test_{broken.test}", sound, sound)
    inner = DictStore()
    with pytest.raises((AssertionError, StoreError, pytest.fail.Exception)):
        run(f"test_{broken.test}", inner, broken.make(inner))


def test_every_conformance_test_can_fail() -> None:
    """For each test of the suite there is a broken store that it catches."""
    assert names_of_tests() == {f"test_{broken.test}" for broken in BROKEN}
