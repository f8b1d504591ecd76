"""Create-if-absent on a local filesystem: three ways to put a finished file under a name only if the name is free."""

from __future__ import annotations

import contextlib
import errno
import os

from dcp_storage.stores.local_syscalls import Syscalls, fill

__all__ = ["by_exclusive_open", "by_link", "by_rename", "place"]

_NO_LINKS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EXDEV, errno.EINVAL}
)
_NO_RENAME = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


def place(calls: Syscalls, temp: str, final: str, data: bytes) -> None:
    """Makes ``final`` if it is not there, by the best way that the filesystem has.

    Args:
        calls: the system calls.
        temp: a finished and synced file with ``data`` in the same folder; it may be there afterwards or not.
        final: the name to take.
        data: the bytes once more, for the last way.

    Raises:
        FileExistsError: the name is taken.
        OSError: as the system says.
    """
    if not by_link(calls, temp, final) and not by_rename(calls, temp, final):
        by_exclusive_open(calls, final, data)


def by_link(calls: Syscalls, temp: str, final: str) -> bool:
    """A hard link: one step, whole, and ``temp`` stays. False where the filesystem has none; raises if taken."""
    try:
        calls.link(temp, final)
    except FileExistsError:
        # Over NFS a link whose answer was lost is sent again, and the second finds the first: look whose it is.
        if not _same_file(temp, final):
            raise
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


def by_rename(calls: Syscalls, temp: str, final: str) -> bool:
    """A rename that never replaces: one step, whole. False where the filesystem has none; raises if taken."""
    try:
        calls.rename_new(temp, final)
    except FileExistsError:
        # As with links: if our own file has left its place, the first of two tries went through.
        if os.path.lexists(temp):
            raise
    except OSError as error:
        if error.errno in _NO_RENAME:
            return False
        raise
    return True


def by_exclusive_open(calls: Syscalls, final: str, data: bytes) -> None:
    """``O_EXCL`` under the final name: one winner, but readers may see a part of the body for a moment.

    What is created this way must check itself; commits and claims do.
    """
    fd = calls.open(final, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        fill(calls, fd, [memoryview(data)])
    except BaseException:
        # It is ours (O_EXCL gave it to nobody else) and not whole. The first error is the one to tell.
        with contextlib.suppress(OSError):
            calls.unlink(final)
        raise


def _same_file(temp: str, final: str) -> bool:
    try:
        ours, theirs = os.lstat(temp), os.lstat(final)
    except FileNotFoundError:  # taken a moment ago and gone again: it was not ours
        return False
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
