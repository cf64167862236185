"""The completions journal: append-only JSONL files that are the single truth of generation.

Two kinds of line matter most. An *intent* (sample, attempt, body digest, reserved dollars) is durable before the first
byte of its request goes out; an *outcome* (raw reply, billed usage, cost, or why there is none) is durable before an
answer counts. Entries are encoded and handed to the kernel together every `HAND_OVER_S`, and synced together every
`SYNC_WINDOW_S`. What a line looks like is in `eagle3.generation.journal_lines`.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from eagle3.artifacts import sync_directory
from eagle3.errors import ArtifactError
from eagle3.generation.journal_lines import Place, encode_line, journal_paths
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
cost more each, and 64 or 128 as much: `journaled` over `fetch` in tests/bench/bench_generation.py with other values.
Their pieces go out with one `writev`, which takes 1024."""


class _File:
    """One dataset's open journal file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file: FileIO | None = None
        self.path = folder
        self.offset = 0
        """Of the next line."""
        self.is_dirty = False
        self._pieces: list[bytes] = []
        """Not yet handed over."""
        self._full: list[FileIO] = []
        """Synced and left; a sync in another thread may still hold the descriptor of one."""

    def append(self, line: Sequence[bytes]) -> Place:
        """Take a line, in pieces: after `hand_over` it survives the end of this process, after `sync` a power cut."""
        if self.file is None or self.offset >= ROTATE_BYTES:
            self._open_next()
        place = Place(self.path, self.offset, sum(map(len, line)))
        self._pieces += line
        self.offset += place.length
        self.is_dirty = True
        return place

    def hand_over(self) -> None:
        """Give the kernel what was appended, without a copy."""
        assert self.file is not None
        pieces, self._pieces = self._pieces, []
        if pieces:
            _write_all(self.file.fileno(), pieces)

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
        self.file = FileIO(self.path, "xb")
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

    def _write(self, folder: str, line: Sequence[bytes]) -> Place | None:
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


def _write_all(descriptor: int, pieces: Sequence[bytes]) -> None:
    written = os.writev(descriptor, pieces)
    if written < sum(map(len, pieces)):  # a signal came, or the disk is about to be full
        rest = memoryview(b"".join(pieces))[written:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _close(file: FileIO) -> None:
    with contextlib.suppress(OSError):  # what counts was synced before
        file.close()


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
