"""Showing where long work stands: in the run directory, in the terminal and as progress artifacts in the Prefect UI."""

import contextvars
import re
import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext

from eagle3.progress import Progress, ProgressEvent
from eagle3.progress_log import ProgressLog
from eagle3.progress_pace import duration
from tasks.job import Job

UPDATE_PERIOD_S = 10.0
"""Between two updates of one artifact; each costs the server about 10 ms of CPU."""

PACE_UPDATES = 6
"""Updates over which the rate is taken: a minute, long enough to be calm and short enough to show a change."""

_listeners: list[Progress] = []


@contextmanager
def listening(listener: Progress) -> Generator[None]:
    """Let `listener` hear every progress event of this process, for example to draw bars in a terminal."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class TaskProgress:
    """A progress listener for one task run: writes progress.jsonl, feeds listeners, updates artifacts in place.

    Artifacts are updated by a thread of its own, which inherits the task's context, so that neither the work nor its
    event loop ever waits for the server.
    """

    def __init__(self, job: Job, *, is_logged: bool = True) -> None:
        """Prepare listening for `job`; nothing is sent before `__enter__`.

        Args:
            job: What is worked on.
            is_logged: Whether events go into progress.jsonl as well; only the holder of the run directory may write it.
        """
        self._job = job
        self._log = ProgressLog(job.run.path / "progress.jsonl") if is_logged else None
        self._latest: dict[str, ProgressEvent] = {}
        self._artifacts: dict[str, UUID] = {}
        self._moments: dict[str, deque[tuple[float, float]]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._update_until_stopped), daemon=True)

    def __call__(self, event: ProgressEvent) -> None:
        """Take one event; cheap, callable from any thread."""
        if self._log is not None:
            self._log(event)
        for listener in tuple(_listeners):
            listener(event)
        with self._lock:
            self._latest[f"{event.stage}-{event.label}"] = event

    def __enter__(self) -> Self:
        """Start updating artifacts."""
        if TaskRunContext.get() is not None or FlowRunContext.get() is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write the last state of every artifact and stop."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        if self._log is not None:
            self._log.close()

    def _update_until_stopped(self) -> None:
        shown: dict[str, ProgressEvent] = {}
        while True:
            stopping = self._stop.wait(UPDATE_PERIOD_S if shown else 2.0)
            with self._lock:
                latest = dict(self._latest)
            for key, event in latest.items():
                if shown.get(key) is not event:
                    self._show(key, event)
            shown = latest
            if stopping:
                return

    def _pace(self, key: str, event: ProgressEvent) -> float:
        """Return units per second over the last minute or so."""
        moments = self._moments.setdefault(key, deque(maxlen=PACE_UPDATES))
        moments.append((time.monotonic(), event.done))
        (started, done_then), (now, done) = moments[0], moments[-1]
        return (done - done_then) / (now - started) if now > started else 0.0

    def _show(self, key: str, event: ProgressEvent) -> None:
        percent = 100.0 * event.done / event.total if event.total else 0.0
        description = describe(event, self._pace(key, event))
        if key in self._artifacts:
            update_progress_artifact(self._artifacts[key], progress=percent, description=description)
            return
        created = create_progress_artifact(
            progress=percent, key=artifact_key("progress", self._job.recipe.name, key), description=description
        )
        if isinstance(created, UUID):
            self._artifacts[key] = created


def artifact_key(*parts: str) -> str:
    """Join parts into an artifact key: lower case, digits and single dashes, as the server demands."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(part for part in parts if part).lower()).strip("-")


def describe(event: ProgressEvent, per_s: float = 0.0) -> str:
    """Say in one line where a stage stands, the most wanted first: cards of the UI cut it after three dozen letters.

    Args:
        event: The newest event.
        per_s: Units per second lately; 0 leaves out rate and time left.
    """
    figures = dict(event.values)
    spent, budget = figures.pop("spent_usd", None), figures.pop("budget_usd", None)
    refused = figures.pop("rate_limited", None)
    parts = [f"{event.done:,.0f}/{event.total:,.0f}" if event.total else f"{event.done:,.0f}"]
    if spent is not None:
        parts.append(_usd(spent) if budget is None else f"{_usd(spent)} of {_usd(budget)}")
    if per_s > 0 and event.total > event.done:
        parts.append(f"{duration((event.total - event.done) / per_s)} left")
    if per_s > 0:
        parts.append(f"{per_s:,.3g} {event.unit} per s")
    if isinstance(refused, int):
        parts.append(f"429: {refused / max(1, event.done + refused):.0%}")
    parts += [_figure(key, value) for key, value in figures.items()]
    return " · ".join(parts)


def _figure(key: str, value: float | str) -> str:
    if key.endswith("_usd"):
        return f"{key.removesuffix('_usd').replace('_', ' ')} {_usd(value)}"
    text = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
    return f"{key.replace('_', ' ')} {text}"


def _usd(value: float | str) -> str:
    """Write dollars to the cent, and smaller sums to three digits, never as a power of ten."""
    amount = float(value)
    if amount == 0 or amount >= 1:
        return f"${amount:,.2f}".removesuffix(".00")
    return f"${float(f'{amount:.3g}'):.9f}".rstrip("0")
