"""The progress log of a run: `progress.jsonl`, one JSON line per event, from which reports draw their curves.

It tells what was seen, never what is true: spend and samples come from manifests and from the journal. A log that is
torn, missing or incomplete costs a plot, nothing else.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self, TextIO

from pydantic import TypeAdapter, ValidationError

from eagle3.progress import ProgressEvent

MIN_INTERVAL_S = 0.5
"""Seconds between two lines of the same stage and label; curves need no more."""
WORKING_GAP_S = 30.0
"""A shorter silence counts as work even when another process broke it: several may write at the same time."""
_PROCESS_STARTED = time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent:
    """One line of the log."""

    time: float
    """Seconds since 1970, UTC."""
    process_started: float
    """When the writing process started: tells the attempts of a resumed run apart."""
    event: ProgressEvent


_EVENT = TypeAdapter(ProgressEvent)


class ProgressLog:
    """A progress listener that appends events to a file; safe to call from several threads."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, process_started: float = _PROCESS_STARTED
    ) -> None:
        """Open the log for appending; a torn last line of a killed process is closed first.

        Args:
            path: Usually `progress.jsonl` in the run directory, which must exist.
            clock: Seconds since 1970.
            process_started: Of the writing process, seconds since 1970.
        """
        torn = _is_torn(path)
        self._file: TextIO = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")
        self._clock = clock
        self._process_started = process_started
        self._lock = Lock()
        self._written: dict[tuple[str, str], float] = {}
        self._waiting: dict[tuple[str, str], tuple[float, ProgressEvent]] = {}

    def __call__(self, event: ProgressEvent) -> None:
        """Log an event, or keep it for later when one of its kind was logged a moment ago."""
        with self._lock:
            if self._file.closed:
                return
            now = self._clock()
            self._waiting[event.stage, event.label] = (now, event)
            is_last = 0 < event.total <= event.done
            for key, (seen, waiting) in list(self._waiting.items()):
                is_due = now - self._written.get(key, float("-inf")) >= MIN_INTERVAL_S
                if is_due or (is_last and waiting is event):
                    self._write(seen, waiting)

    def close(self) -> None:
        """Write what still waits, so that the last event of every kind is in the log, and close it."""
        with self._lock:
            if self._file.closed:
                return
            for seen, event in list(self._waiting.values()):
                self._write(seen, event)
            self._file.close()

    def __enter__(self) -> Self:
        """Return the log itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the log."""
        self.close()

    def _write(self, seen: float, event: ProgressEvent) -> None:
        del self._waiting[event.stage, event.label]
        self._written[event.stage, event.label] = seen
        line: dict[str, Any] = {
            "time": round(seen, 3),
            "process_started": round(self._process_started, 3),
            **asdict(event),
        }
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()


def _is_torn(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_progress(path: Path) -> Sequence[LoggedEvent]:
    """Return the events of a log in file order; a missing log has none, and lines that are not whole are skipped."""
    if not path.is_file():
        return ()
    events: list[LoggedEvent] = []
    for raw in path.read_bytes().splitlines():
        event = _parse(raw)
        if event is not None:
            events.append(event)
    return events


def _parse(raw: bytes) -> LoggedEvent | None:
    try:
        line: object = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    try:
        event = _EVENT.validate_python({str(key): value for key, value in line.items() if key not in _LOG_KEYS})  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - JSON
        seen = float(line["time"])  # pyright: ignore[reportUnknownArgumentType] - JSON
        started = float(line.get("process_started", 0.0))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType] - JSON
    except (ValidationError, KeyError, TypeError, ValueError):
        return None
    return LoggedEvent(time=seen, process_started=started, event=event)


_LOG_KEYS = frozenset({"time", "process_started"})


def active_seconds(events: Sequence[LoggedEvent]) -> Sequence[float]:
    """Return for each event the seconds worked until then: pauses between two processes do not count."""
    elapsed: list[float] = []
    total = 0.0
    previous: LoggedEvent | None = None
    for entry in events:
        if previous is not None:
            gap = max(0.0, entry.time - previous.time)
            is_same_process = entry.process_started == previous.process_started
            total += gap if is_same_process or gap < WORKING_GAP_S else 0.0
        elapsed.append(total)
        previous = entry
    return elapsed
