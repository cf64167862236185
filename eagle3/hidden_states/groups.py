"""Groups of rows that several machines extract: who has which, and which are done.

A group is held by a lock, so that no two processes ever extract the same rows; the lock ends with its process or its
machine. A group is done when its record lies in the stage folder, written after all of its files.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from eagle3.artifacts import ShardRef, commit_json
from eagle3.errors import ArtifactError, RunLockedError
from eagle3.locks import held, is_held
from eagle3.records import JsonObject

FOLDER = ".groups"
"""Inside the stage folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """What one finished group left."""

    plan: str
    """Digest of everything that decides which files the groups make."""
    shards: tuple[ShardRef, ...]
    gates: JsonObject
    """Figures of the gates on the machine that worked."""
    computed_tokens: int
    seconds: float
    """Time for the computed tokens, loading left out."""
    resumed_samples: int


_RECORD = TypeAdapter(GroupRecord)


class Division:
    """The groups of one stage folder."""

    def __init__(self, stage_path: Path, count: int) -> None:
        """Name the groups; nothing is created yet.

        Args:
            stage_path: Folder of the stage.
            count: Number of groups.
        """
        self.stage_path = stage_path
        self.folder = stage_path / FOLDER
        self.count = count

    @property
    def numbers(self) -> range:
        """All groups."""
        return range(self.count)

    def record(self, number: int, plan: str) -> GroupRecord | None:
        """Return what a finished group left; None while it is unfinished, was planned otherwise, or lost a file.

        Raises:
            ArtifactError: The record cannot be read.
        """
        path = self._path(number, "json")
        if not path.is_file():
            return None
        try:
            record = _RECORD.validate_json(path.read_bytes())
        except ValueError as exc:
            raise ArtifactError(
                f"record {path.name!r} of hidden states cannot be read: it was edited or written by another version. "
                "Delete it and run 'eagle3 extract' again."
            ) from exc
        return record if record.plan == plan and all(map(self._is_there, record.shards)) else None

    def commit(self, number: int, record: GroupRecord) -> None:
        """Call a group done; its files must be durable."""
        commit_json(self._path(number, "json"), _RECORD.dump_python(record, mode="json"))

    @contextmanager
    def holding(self, numbers: Sequence[int]) -> Generator[None]:
        """Hold one group or several.

        Raises:
            RunLockedError: Another process works on one of them.
        """
        if not numbers:
            yield
            return
        first, *others = numbers
        self.folder.mkdir(parents=True, exist_ok=True)
        what = f"group {first + 1} of {self.count} of the hidden states"
        with held(self._path(first, "lock"), what), self.holding(others):
            yield

    def is_held(self, number: int) -> bool:
        """Tell whether a process works on a group."""
        return is_held(self._path(number, "lock"))

    def forget(self) -> None:
        """Remove the records of a stage that is sealed."""
        for path in self.folder.glob("group-*.json"):
            path.unlink()

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"group-{number:05d}-of-{self.count:05d}.{suffix}"

    def _is_there(self, shard: ShardRef) -> bool:
        path = self.stage_path / shard.path
        return path.is_file() and path.stat().st_size == shard.size_bytes


def require_no_other_division(stage_path: Path, count: int) -> None:
    """Make sure that nobody works on groups of another division, whose rows would overlap with ours.

    Raises:
        RunLockedError: Somebody does.
    """
    for lock in sorted((stage_path / FOLDER).glob("group-*.lock")):
        if not lock.stem.endswith(f"-of-{count:05d}") and is_held(lock):
            raise RunLockedError(
                f"{lock.stem!r} of the hidden states is at work, from a division into another number of groups than "
                f"{count}. Wait until it ends, or cancel its flow run, then run again."
            )
