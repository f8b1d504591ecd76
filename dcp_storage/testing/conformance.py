"""What every :class:`~dcp_storage.store.Store` must do, as tests for pytest.

Subclass :class:`StoreConformance` in a test module, under a name that pytest collects, and say how to get a store::

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self, tmp_path):
            with closing(MyStore(tmp_path)) as store:
                yield store

Only what can be seen from outside is tested; durability and a listing that fails half-way need faults below the store.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcp_storage.store import Store

# Before the tests are imported: a failure then shows the values it compared, also in somebody else's test run.
pytest.register_assert_rewrite(
    "dcp_storage.testing.conformance_folders",
    "dcp_storage.testing.conformance_objects",
    "dcp_storage.testing.conformance_writes",
)

from dcp_storage.testing.conformance_folders import FolderConformance  # noqa: E402
from dcp_storage.testing.conformance_objects import ObjectConformance  # noqa: E402
from dcp_storage.testing.conformance_writes import WriteConformance  # noqa: E402

__all__ = ["StoreConformance"]


class StoreConformance(ObjectConformance, FolderConformance, WriteConformance):
    """The tests. A subclass has a fixture ``store``: a Store of a fresh, empty folder.

    It may override the other fixtures, and sets ``uploads_last = True`` where an upload that was begun and left stays
    until somebody aborts it (as on S3).
    """

    @pytest.fixture
    def second(self, store: Store) -> Store:
        """Another Store object of the same folder, best with a client and caches of its own; the same by default."""
        return store

    @pytest.fixture
    def below(self) -> Store | None:
        """A Store of a sub-folder of ``store``'s folder, None where there is no way to make one."""
        return None

    @pytest.fixture
    def inside(self) -> Callable[[str], Store] | None:
        """Makes a Store of the sub-folder of a given name in ``store``'s folder; None where there is no way."""
        return None

    @pytest.fixture
    def beside(self) -> Store | None:
        """A Store of a folder whose path is that of ``store``'s folder and one character more; None likewise."""
        return None
