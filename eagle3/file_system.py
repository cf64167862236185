"""What a file system must offer to hold runs, checked before it does: on one machine, and between several.

On one machine: locks that exclude, files made exclusively, renames that replace, a clock that agrees. Between machines
that share the work of a run there is a leader. It holds a lock and leaves a note; each machine that joins must find the
note and must not get the lock. That proves what no machine can prove alone: the same storage, locks that reach across.
"""

import fcntl
import socket
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import TypeAdapter

from eagle3.artifacts import commit_bytes, commit_json
from eagle3.errors import ConfigurationError
from eagle3.locks import held, is_held

MAX_CLOCK_SKEW_S = 60.0
"""Times order attempts and progress for people; nothing that is computed depends on them."""
SEEN_WITHIN_S = 90.0
"""A network file system may hide a new file from other machines for as long as it caches folders, 60 s by default."""
NOTE_NAME, LOCK_NAME = "leader.json", "leader.lock"


def check_file_system(directory: Path) -> None:
    """Make sure a folder keeps the promises that runs need; takes milliseconds.

    Raises:
        ConfigurationError: It does not; the message says which.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".check", dir=directory) as place:
        _check_locks(Path(place) / "lock", directory.name)
        _check_exclusive_creation(Path(place) / "once", directory.name)
        new = Path(place) / "new"
        commit_bytes(new, b"1")
        commit_bytes(new, b"2")
        if new.read_bytes() != b"2":
            raise ConfigurationError(f"folder {directory.name!r} shows an old file after a rename. Put runs elsewhere.")
        check_clock(new.stat().st_mtime, time.time(), directory.name)


def _check_locks(lock: Path, name: str) -> None:
    with lock.open("w") as first, lock.open("w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise ConfigurationError(
                f"folder {name!r} offers no file locks ({exc.strerror}): two runs could write into one "
                "directory. Put runs on a local disk, or on NFS 4 or another file system with locks."
            ) from exc
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        raise ConfigurationError(
            f"folder {name!r} grants the same lock twice: two runs could write into one directory. "
            "Put runs on a local disk, or mount the shared one without 'nolock'."
        )


def _check_exclusive_creation(path: Path, name: str) -> None:
    path.touch(exist_ok=False)
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return
    raise ConfigurationError(
        f"folder {name!r} makes a file anew that must not exist (O_EXCL is ignored). Put runs elsewhere."
    )


def check_clock(written: float, now: float, name: str) -> None:
    """Make sure that the clock of this machine agrees with that of the storage.

    Args:
        written: Modification time of a file just written, seconds since 1970.
        now: This machine's time.
        name: Of the folder, for the message.

    Raises:
        ConfigurationError: They differ by more than `MAX_CLOCK_SKEW_S`.
    """
    skew_s = written - now
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        raise ConfigurationError(
            f"the clock of {socket.gethostname()!r} differs by {abs(skew_s):,.0f} s from that of folder {name!r}; "
            f"at most {MAX_CLOCK_SKEW_S:.0f} s are allowed. Set the time on both, for example by NTP."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderNote:
    """What the leader of shared work leaves for the machines that join."""

    id: str
    """The same for as long as the claim stays, also when the leader starts again."""
    claim: Mapping[str, str]
    """What the work is about; machines that see it otherwise must not take part."""


_NOTE = TypeAdapter(LeaderNote)


@contextmanager
def leading(folder: Path, claim: Mapping[str, str]) -> Generator[LeaderNote]:
    """Lead the work in a folder for as long as the block lasts; others join with `require_leader`.

    Raises:
        RunLockedError: Somebody leads it already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder / LOCK_NAME, f"the work in {folder.parent.name!r}"):
        note = _read(folder)
        if note is None or note.claim != claim:
            note = LeaderNote(id=uuid4().hex[:12], claim=dict(claim))
            commit_json(folder / NOTE_NAME, asdict(note))
        yield note


def require_leader(
    folder: Path, leader_id: str, claim: Mapping[str, str] | None = None, *, patience_s: float = SEEN_WITHIN_S
) -> None:
    """Make sure that this machine works on the same files, under the same locks, as the leader that called it.

    Args:
        folder: Folder of the work as this machine sees it.
        leader_id: `LeaderNote.id`, told by the leader.
        claim: What the work is about as seen here; None does not compare.
        patience_s: How long the note may take to show.

    Raises:
        ConfigurationError: The note is not here, is another one, claims something else, or the lock is free.
    """
    here = f"machine {socket.gethostname()!r}"
    deadline = time.monotonic() + patience_s
    while (note := _read(folder)) is None or note.id != leader_id:
        if time.monotonic() >= deadline:
            found = "nothing" if note is None else f"note {note.id}"
            raise ConfigurationError(
                f"{here} finds {found} where the leader of this work left note {leader_id}: it works for another "
                "attempt, or this machine does not see the leader's storage. Give every machine the same run root, by "
                "the same path or by a storage root block."
            )
        time.sleep(min(1.0, patience_s))
    if not is_held(folder / LOCK_NAME):
        raise ConfigurationError(
            f"{here} could take the lock that the leader of this work holds: the leader has ended, or locks of this "
            "file system do not reach from machine to machine, and two of them could write the same files. Use NFS 4 "
            "or another file system with shared locks, mounted without 'nolock' and 'local_lock'."
        )
    differing = [key for key, value in (claim or note.claim).items() if note.claim.get(key) != value]
    if differing:
        raise ConfigurationError(
            f"{here} would make something else than the leader of this work: {', '.join(differing)} differ. Install "
            "the same versions and the same project on every machine."
        )


def _read(folder: Path) -> LeaderNote | None:
    path = folder / NOTE_NAME
    return _NOTE.validate_json(path.read_bytes()) if path.is_file() else None
