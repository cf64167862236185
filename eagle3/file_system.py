"""What a file system must offer to hold runs: locks that exclude and renames that replace."""

import fcntl
import tempfile
from pathlib import Path

from eagle3.artifacts import commit_bytes
from eagle3.errors import ConfigurationError


def check_file_system(directory: Path) -> None:
    """Make sure a folder keeps the promises that runs need: exclusive locks that exclude, and renames that replace.

    Raises:
        ConfigurationError: It does not; the message says which.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".check", dir=directory) as place:
        lock, new = Path(place) / "lock", Path(place) / "new"
        with lock.open("w") as first, lock.open("w") as second:
            try:
                fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                raise ConfigurationError(
                    f"folder {directory.name!r} offers no file locks ({exc.strerror}): two runs could write into one "
                    "directory. Put runs on a local disk, or on NFS 4 or another file system with locks."
                ) from exc
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass
            else:
                raise ConfigurationError(
                    f"folder {directory.name!r} grants the same lock twice: two runs could write into one directory. "
                    "Put runs on a local disk, or mount the shared one without 'nolock'."
                )
        commit_bytes(new, b"1")
        commit_bytes(new, b"2")
        if new.read_bytes() != b"2":
            raise ConfigurationError(f"folder {directory.name!r} shows an old file after a rename. Put runs elsewhere.")
