"""A cache of directories that appear whole or not at all.

A directory is built beside its place and renamed into it. Several processes may build the same one: the first
to end wins, the others drop theirs. A process may be killed at any point: what it leaves has a name that is
taken for nothing, and a later build removes it.
"""

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_BUILDING = ".building-"  # no finished directory has such a name
_LOCK = "lock"
# A directory is locked just after it is made: within this time an unlocked one may be alive.
_UNLOCKED_GRACE_SECONDS = 60
# Where the file system has no locks, only age tells a dead build.
_ABANDONED_SECONDS = 7 * 24 * 3600


@contextmanager
def building(directory: Path) -> Iterator[Path]:
    """Build a directory: what is in the yielded one when the block ends becomes `directory`, if there is none
    yet.

    The yielded directory holds a lock that ends with the process: it tells builds that live from those that
    were killed.

    Args:
        directory: the place; its parent is made when missing.

    Returns:
        A context manager that gives an empty directory on the same file system, and removes it after an
        exception.

    Raises:
        OSError: the parent cannot be written.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_dead_builds(directory.parent)
    temporary = _temporary(directory)
    temporary.mkdir()
    try:
        with (temporary / _LOCK).open("w") as lock:
            _try_lock(lock)
            yield temporary
            (temporary / _LOCK).unlink()
            _sync_directory(temporary)
            _rename(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def discard(directory: Path) -> None:
    """Remove a finished directory, so that at no moment a half of it is seen.

    Args:
        directory: what to remove; it may be gone already.
    """
    doomed = _temporary(directory)
    try:
        directory.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def flush(file: IO[Any]) -> None:
    """Bring what was written to a file onto the disk."""
    file.flush()
    os.fsync(file.fileno())


def _temporary(directory: Path) -> Path:
    return directory.with_name(f"{_BUILDING}{directory.name}-{os.getpid()}-{secrets.token_hex(4)}")


def _rename(temporary: Path, directory: Path) -> None:
    try:
        temporary.rename(directory)
    except OSError as error:
        # Another process was faster, and what it built is equal.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_dead_builds(parent: Path) -> None:
    for temporary in parent.glob(f"{_BUILDING}*"):
        try:
            if _is_dead(temporary):
                shutil.rmtree(temporary, ignore_errors=True)
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else


def _is_dead(temporary: Path) -> bool:
    age_seconds = time.time() - temporary.stat().st_mtime
    if age_seconds < _UNLOCKED_GRACE_SECONDS:
        return False
    try:
        with (temporary / _LOCK).open("r+") as lock:
            has_lock = _try_lock(lock)
    except FileNotFoundError:  # it is just being renamed, or was half removed
        has_lock = None
    return age_seconds > _ABANDONED_SECONDS if has_lock is None else has_lock


def _try_lock(file: IO[str]) -> bool | None:
    """Whether this process now has the lock; None where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
