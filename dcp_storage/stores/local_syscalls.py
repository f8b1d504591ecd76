"""The system calls that make a local write durable, as a record that tests can replace, and what is built on them.

A test that imitates a power loss records these calls and replays what had reached the disk; a test of a full disk
raises in one of them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "IOV_MAX",
    "Syscalls",
    "advance",
    "fill",
    "make_folders",
    "rename_noreplace",
    "reserve",
    "sync_folder",
    "write_all",
    "write_new",
]

IOV_MAX = os.sysconf("SC_IOV_MAX")
"""Most pieces that one ``preadv`` or ``pwritev`` takes."""

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


def rename_noreplace(source: str, target: str) -> None:
    """Renames ``source`` to ``target`` only if there is no ``target``, in one step (``renameat2``).

    Raises:
        OSError: as the system says; ``ENOSYS`` where the C library has no such call.
    """
    # Resolved here, not at import: most processes never need it, and not every C library has it.
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    call.restype = ctypes.c_int
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, target)


def reserve(fd: int, offset: int, length: int) -> None:
    """Sets disk space aside for bytes about to be written, the file's size unchanged (``fallocate``, Linux).

    The blocks are then found at once and not page by page, which halves the CPU time of a large write on ext4. Where
    the filesystem or the system has no such call, nothing happens; the C library's stand-in would write zeros.

    Raises:
        OSError: there is no room, or as the system says.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        return
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call.restype = ctypes.c_int
    if call(fd, _KEEP_SIZE, offset, length) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EINTR):
            raise OSError(number, os.strerror(number))


def _may_write(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


@dataclass(frozen=True)
class Syscalls:
    """Every call of :class:`~dcp_storage.stores.local.LocalStore` that changes the disk or makes a change durable.

    Attributes:
        open: (path, flags, mode) -> descriptor, of files and (to sync them) of folders.
        close: (descriptor).
        write: (descriptor, pieces, offset) -> bytes written, perhaps fewer than given.
        reserve: (descriptor, offset, bytes), sets space aside.
        truncate: (descriptor, size in bytes).
        fsync: (descriptor).
        link: (existing, new), a hard link.
        rename_new: (source, target), only if there is no target.
        replace: (source, target), replacing what is there.
        unlink: (path).
        mkdir: (path, mode), the mode before the umask.
        may_write: (folder) -> whether files may be made in it.
    """

    open: Callable[[str, int, int], int] = os.open
    close: Callable[[int], None] = os.close
    write: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    reserve: Callable[[int, int, int], None] = reserve
    truncate: Callable[[int, int], None] = os.ftruncate
    fsync: Callable[[int], None] = os.fsync
    link: Callable[[str, str], None] = os.link
    rename_new: Callable[[str, str], None] = rename_noreplace
    replace: Callable[[str, str], None] = os.replace
    unlink: Callable[[str], None] = os.unlink
    mkdir: Callable[[str, int], None] = os.mkdir
    may_write: Callable[[str], bool] = _may_write


def advance(pieces: list[memoryview], first: int, count: int) -> int:
    """Steps over ``count`` bytes of ``pieces[first:]``, cutting the piece that is only partly done.

    Returns:
        The index of the first piece that is not done.
    """
    while first < len(pieces) and count >= pieces[first].nbytes:
        count -= pieces[first].nbytes
        first += 1
    if count:
        pieces[first] = pieces[first][count:]
    return first


def write_all(calls: Syscalls, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Writes all bytes of ``buffers`` from ``offset`` on, however few the system takes at a time."""
    pieces = [piece for piece in buffers if piece.nbytes]
    first = 0
    while first < len(pieces):
        written = calls.write(fd, pieces[first : first + IOV_MAX], offset)
        if written <= 0:  # never for a regular file, but it must not become an endless loop
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset += written
        first = advance(pieces, first, written)


def fill(calls: Syscalls, fd: int, buffers: Sequence[memoryview]) -> None:
    """Writes the bytes from the file's start, makes them durable and closes the descriptor, also on a failure."""
    try:
        write_all(calls, fd, buffers, 0)
        calls.fsync(fd)
    finally:
        calls.close(fd)


def write_new(calls: Syscalls, path: str, buffers: Sequence[memoryview]) -> None:
    """Makes a file that must not be there yet, with the bytes on the disk (its name is not yet).

    The mode is 0o666 less the umask, as of any file that a program makes. A failure leaves the file to the caller.
    """
    fill(calls, calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), buffers)


def sync_folder(calls: Syscalls, folder: str) -> None:
    """Makes the folder's names durable: what was created, renamed and removed in it."""
    fd = calls.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0)
    try:
        calls.fsync(fd)
    except OSError as error:
        # Filesystems that cannot sync a folder (some network and FUSE ones) answer with these two, and write names
        # through by themselves. Every other error is a real one.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        calls.close(fd)


def make_folders(calls: Syscalls, path: str) -> None:
    """Makes the folder and its missing parents, each with its name durable; also that of the first one that is there.

    Raises:
        OSError: ``ENOTDIR`` where the path or a part of it is a file, ``EACCES`` or ``EROFS`` where it cannot be
            written, else as the system says.
    """
    folder, missing = Path(path), []
    while not _is_folder(folder):
        missing.append(folder)
        folder = folder.parent
    _sync_name(calls, folder)
    for folder in reversed(missing):
        try:
            calls.mkdir(str(folder), 0o777)
        except FileExistsError:  # another rank was faster (its sync may still be to come), or it is a dangling link
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        sync_folder(calls, str(folder))
        sync_folder(calls, str(folder.parent))
    if not calls.may_write(path):
        number = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(number, os.strerror(number), path)


def _sync_name(calls: Syscalls, folder: Path) -> None:
    """Makes the name of a folder durable that is there already: who made it may have been killed before that."""
    try:
        sync_folder(calls, str(folder.parent))
    except OSError as error:
        # A folder that we may not read, or whose disk is read-only, is none in which we have made another one.
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise


def _is_folder(path: Path) -> bool:
    """Whether the folder is there; raises where it is something else or cannot be looked at."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return True
