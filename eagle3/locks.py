"""Exclusive locks on files. They end with the process that holds them, also with its machine, so none can leak."""

import fcntl
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from eagle3.errors import RunLockedError

PATIENCE_S = 1.0
"""`is_held` takes a lock for a moment to see whether it can; who wants that lock then must not be turned away."""


@contextmanager
def held(path: Path, what: str) -> Generator[None]:
    """Hold the lock file `path` for as long as the block lasts; the file itself stays.

    Args:
        path: Lock file; its folder must exist. It names the holder for people.
        what: What the lock protects, for the message.

    Raises:
        RunLockedError: Another process holds it.
    """
    with path.open("a+") as lock:
        deadline = time.monotonic() + PATIENCE_S
        while not _taken(lock):
            if time.monotonic() > deadline:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                raise RunLockedError(
                    f"{what} is in use by process {holder}. Wait until it ends, or stop it, then run again."
                )
            time.sleep(PATIENCE_S / 20)
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


def is_held(path: Path) -> bool:
    """Tell whether a living process holds the lock file `path`."""
    if not path.is_file():
        return False
    with path.open("a+") as lock:
        return not _taken(lock)


def _taken(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
