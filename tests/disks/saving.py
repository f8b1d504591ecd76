"""A process that saves over a checkpoint in each of some folders, and prints what came of each: a line of JSON."""

from __future__ import annotations

import errno
import json
import sys
import warnings
from typing import Any

from dcp_storage import CheckpointError, SaveOptions
from tests.disks import writer_with
from tests.disks.injecting import Injector, Point
from tests.e2e import save, small_state
from tests.protocol.oracle import attempt_to

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Saves to each folder; with ``call``, ``file`` and ``error`` that call of each save fails, without the kernel.

    Args:
        arguments: the call, the file and the name of the error (each ``-`` where the kernel does it), then the folders.
    """
    call, file, error, *folders = arguments
    warnings.simplefilter("ignore")
    for folder in folders:
        point = None if call == "-" else Point(call, file, 0)
        injector = Injector(folder, point, errno.EIO if error == "-" else getattr(errno, error))
        options = SaveOptions(attempts=1, max_concurrency=1)
        writer = writer_with(folder, injector.calls(), overwrite=True, options=options)
        raised = attempt_to(lambda w=writer: save(small_state(2), w))  # type: ignore[misc]
        said: dict[str, Any] = {"type": type(raised).__name__, "text": str(raised)}
        if isinstance(raised, CheckpointError):
            said |= {name: getattr(raised, name, None) for name in ("errno", "key", "operation", "kind")}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
