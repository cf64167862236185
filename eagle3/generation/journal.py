"""The completions journal: append-only JSONL files that are the single truth of generation.

Two kinds of line matter most. An *intent* (sample, attempt, body digest, reserved dollars) is durable before the first
byte of its request goes out; an *outcome* (raw reply, billed usage, cost, or why there is none) is durable before an
answer counts. Each line carries a checksum. Entries are encoded and handed to the kernel together every `HAND_OVER_S`,
and synced together every `SYNC_WINDOW_S`; each process starts a new file, so a line torn by a crash is always the last
of its file and is dropped on replay.
"""

import asyncio
import base64
import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import NamedTuple, cast

from pydantic_core import PydanticSerializationError, from_json, to_json

from eagle3.artifacts import sync_directory
from eagle3.errors import ArtifactError
from eagle3.records import JsonObject

SYNC_WINDOW_S = 0.1
"""Writes within this time share one sync. Shorter windows cost CPU; this one adds little beside an answer's own time.
Source: tests/bench/bench_generation.py."""
ROTATE_BYTES = 256 * 1024 * 1024
"""A larger file is closed and the next one begun, so that old ones can be compressed or moved."""
HAND_OVER_S = 0.01
"""Entries of this time are encoded and written together, which costs less than one by one; a killed process loses no
more than these, unless its loop was late. Source: tests/bench/bench_generation.py."""
AT_ONCE = 32
"""So many entries are not left to wait, which bounds the bodies that a burst of replies keeps in memory. Fewer than 32
cost more each, and 64 or 128 as much: `journaled` over `fetch` in tests/bench/bench_generation.py with other values."""
BUFFER_BYTES = 1024 * 1024
"""Of encoded lines; more than this is written in several pieces."""

_PREFIX = b'{"crc":"'
_PREFIX_LENGTH = len(_PREFIX) + 8 + len(b'",')


class Place(NamedTuple):
    """Where one line lies."""

    path: Path
    offset: int
    length: int

    @property
    def age(self) -> tuple[Path, int, str, int]:
        """Sorts the places of one folder as they were written."""
        return self.path.parent, *_number_order(self.path), self.offset

    def read(self) -> JsonObject:
        """Return the line's entry.

        Raises:
            ArtifactError: The bytes are not what was written.
        """
        with self.path.open("rb") as file:
            file.seek(self.offset)
            line = file.read(self.length)
        entry = decode_line(line)
        if entry is None:
            message = (
                f"journal {self.path.name!r} changed at byte {self.offset} after it was written: restore the file."
            )
            raise ArtifactError(message)
        return entry


def encode_line(entry: JsonObject) -> bytes:
    """Return the line of an entry: JSON whose first member is the crc32 of what follows it.

    A member `raw` of bytes is kept exactly: as text when it is UTF-8, else as base64 named `raw64`.
    """
    try:
        document = to_json(entry)  # five times as fast as the standard library with a long body
    except PydanticSerializationError:
        if not isinstance(entry.get("raw"), bytes):
            raise
        members = {name: value for name, value in entry.items() if name != "raw"}
        document = to_json({**members, "raw64": base64.b64encode(entry["raw"]).decode("ascii")})
    rest = memoryview(document)[1:]
    return b"".join((_PREFIX, b"%08x" % zlib.crc32(rest), b'",', rest, b"\n"))


def decode_line(line: bytes) -> JsonObject | None:
    """Return the entry of a line, or None when it is torn or damaged."""
    if not line.startswith(_PREFIX) or not line.endswith(b"}\n"):
        return None
    rest = line[_PREFIX_LENGTH:-1]
    if line[:_PREFIX_LENGTH] != b'%s%08x",' % (_PREFIX, zlib.crc32(rest)):
        return None
    try:
        return cast("JsonObject", from_json(b"{" + rest))
    except ValueError:
        return None


def raw_of(entry: JsonObject) -> bytes:
    """Return the body of an entry that was read back, exactly as it came."""
    if "raw64" in entry:
        return base64.b64decode(cast("str", entry["raw64"]))
    return cast("str", entry.get("raw", "")).encode("utf-8")


def journal_paths(folder: Path) -> list[Path]:
    """Return the journal files of a folder, oldest first."""
    return sorted(folder.glob("journal-*.jsonl"), key=_number_order)


def _number_order(path: Path) -> tuple[int, str]:
    """Sort file names by their number, which outgrows its four digits in the end."""
    return len(path.name), path.name


def read_journal(path: Path) -> Iterator[tuple[Place, JsonObject]]:
    """Yield the entries of one file with their places; a torn last line is dropped.

    Raises:
        ArtifactError: A line before the last is damaged.
    """
    offset = 0
    torn_at: int | None = None
    with path.open("rb") as file:
        for line in file:
            if torn_at is not None:
                message = (
                    f"journal {path.parent.name}/{path.name} is damaged at byte {torn_at}, before its last line: a "
                    "crash cannot do that. Restore the file, or remove the line if you accept to pay for its answer "
                    "again."
                )
                raise ArtifactError(message)
            entry = decode_line(line)
            if entry is None:
                torn_at = offset
            else:
                yield Place(path, offset, len(line)), entry
            offset += len(line)


class _File:
    """One dataset's open journal file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file: BufferedWriter | None = None
        self.path = folder
        self.offset = 0
        """Of the next line."""
        self.is_dirty = False
        self._full: list[BufferedWriter] = []
        """Synced and left; a sync in another thread may still hold the descriptor of one."""

    def append(self, line: bytes) -> Place:
        """Take a line: after `hand_over` it survives the end of this process, after `sync` a power cut."""
        if self.file is None or self.offset >= ROTATE_BYTES:
            self._open_next()
        assert self.file is not None
        place = Place(self.path, self.offset, len(line))
        self.file.write(line)
        self.offset += len(line)
        self.is_dirty = True
        return place

    def hand_over(self) -> None:
        """Give the kernel what was appended."""
        assert self.file is not None
        self.file.flush()

    def sync(self) -> None:
        """Wait until the disk has what was appended."""
        assert self.file is not None
        os.fdatasync(self.file.fileno())

    def close_full(self) -> None:
        """Close the files that were left; no sync may be under way."""
        while self._full:
            _close(self._full.pop())

    def close(self) -> None:
        """Close everything; what was not handed over is dropped."""
        self.close_full()
        if self.file is not None:
            _close(self.file)

    def _open_next(self) -> None:
        if self.file is not None:
            self.hand_over()
            self.sync()
            self._full.append(self.file)
        self._folder.mkdir(parents=True, exist_ok=True)
        earlier = journal_paths(self._folder)
        number = 1 + (int(earlier[-1].stem.rpartition("-")[2]) if earlier else 0)
        self.path = self._folder / f"journal-{number:04d}.jsonl"
        self.file = BufferedWriter(FileIO(self.path, "xb"), BUFFER_BYTES)
        self.offset = 0
        sync_directory(self._folder)
        sync_directory(self._folder.parent)


class Journal:
    """Writer of all journals of a stage, on the loop that created it. `append` returns when the line is durable."""

    def __init__(self, root: Path, window_s: float = SYNC_WINDOW_S) -> None:
        """Prepare to write below `root`, one folder a name; files appear with their first line."""
        self._root = root
        self._window_s = window_s
        self._files: dict[str, _File] = {}
        self._queue: list[tuple[str, JsonObject, asyncio.Future[Place]]] = []
        """Folders and entries not yet encoded."""
        self._written: list[tuple[asyncio.Future[Place], Place | None]] = []
        """Not yet synced; None for what the disk refused."""
        self._loop = asyncio.get_running_loop()
        self._wakeup = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._writer = asyncio.create_task(self._write_forever())
        self._failure: Exception | None = None
        self._is_closed = False

    async def append(self, folder: str, entry: JsonObject) -> Place:
        """Write one entry and wait for its sync.

        Raises:
            ArtifactError: The disk refused; nothing after this is safe.
        """
        return await self.append_later(folder, entry)

    def append_later(self, folder: str, entry: JsonObject) -> asyncio.Future[Place]:
        """Write one entry; return a future of its place, done when it is durable. Nobody may change the entry before.

        Raises:
            ArtifactError: The disk refused, now or when the future is awaited; or the journal is closed.
        """
        if self._is_closed:
            raise ArtifactError("the journal is closed: nothing can be bought any more. Run again to continue.")
        if self._failure is not None:
            raise _refused(self._failure) from self._failure
        if not self._queue:
            self._loop.call_later(HAND_OVER_S, self._hand_over)
            self._wakeup.set()
        durable: asyncio.Future[Place] = self._loop.create_future()
        self._queue.append((folder, entry, durable))
        if len(self._queue) >= AT_ONCE:
            self._hand_over()
        return durable

    def note(self, folder: str, entry: JsonObject) -> None:
        """Write one entry that nobody waits for: its loss costs time, not money.

        Raises:
            ArtifactError: The disk refused something before, or the journal is closed.
        """
        self.append_later(folder, entry).add_done_callback(_ignore_refusal)

    async def aclose(self) -> None:
        """Sync what is queued, also while this waits, and close the files."""
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        await self._flush()
        while self._queue or self._written:
            await self._flush()
        self._is_closed = True
        for file in self._files.values():
            file.close()

    def _hand_over(self) -> None:
        """Encode what is queued and give it to the kernel."""
        queue, self._queue = self._queue, []
        for folder, entry, durable in queue:
            try:
                line = encode_line(entry)
            except Exception as exc:  # noqa: BLE001 - an entry that is no JSON is its writer's trouble alone
                _tell(durable, exc)
            else:
                self._written.append((durable, self._write(folder, line)))
        if self._failure is not None:
            return  # what was refused must not be written later after all
        try:
            for file in self._files.values():
                if file.is_dirty:
                    file.hand_over()
        except Exception as exc:  # noqa: BLE001 - as above
            self._failure = exc

    def _write(self, folder: str, line: bytes) -> Place | None:
        """Append one line; None once the disk refused."""
        if self._failure is not None:
            return None
        file = self._files.get(folder)
        if file is None:
            file = self._files[folder] = _File(self._root / folder)
        try:
            return file.append(line)
        except Exception as exc:  # noqa: BLE001 - whatever it is, those who wait must be told
            self._failure = exc  # a torn line may be last in its file: nothing may follow it
            return None

    async def _write_forever(self) -> None:
        while True:
            await self._wakeup.wait()
            await asyncio.sleep(self._window_s)
            await asyncio.shield(self._flush())

    async def _flush(self) -> None:
        async with self._flushing:
            await self._flush_alone()

    async def _flush_alone(self) -> None:
        self._wakeup.clear()
        self._hand_over()
        waiting, self._written = self._written, []
        dirty = [file for file in self._files.values() if file.is_dirty]
        for file in dirty:
            file.is_dirty = False
        try:
            if dirty and self._failure is None:
                await self._loop.run_in_executor(None, _sync_all, dirty)
        except Exception as exc:  # noqa: BLE001 - whatever it is, those who wait must be told
            self._failure = exc
        for file in self._files.values():
            file.close_full()
        for durable, place in waiting:
            if self._failure is not None or place is None:
                _tell(durable, _refused(self._failure))
            elif not durable.done():
                durable.set_result(place)


def _close(file: BufferedWriter) -> None:
    with contextlib.suppress(OSError):  # what counts was synced before
        file.raw.close()


def _tell(durable: asyncio.Future[Place], error: Exception) -> None:
    if not durable.done():  # who waited may have been cancelled
        durable.set_exception(error)


def _ignore_refusal(noted: asyncio.Future[Place]) -> None:
    """Pass over what whoever appends next is told; anything else goes to the loop's own log."""
    error = noted.exception()
    if error is not None and not isinstance(error, ArtifactError):
        raise error


def _sync_all(files: Sequence[_File]) -> None:
    for file in files:
        file.sync()


def _refused(exc: BaseException | None) -> ArtifactError:
    return ArtifactError(f"the journal cannot be written: {exc}. Free the disk, then run again.")
