"""Progress bars for terminals."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from eagle3.progress import ProgressEvent

FIGURES: dict[str, str] = {
    "spent_usd": "${}",
    "in_flight": "{} in flight",
    "failed": "{} failed",
    "loss": "loss {}",
    "acceptance_length": "acceptance {}",
    "tokens_per_s": "{} tok/s",
}
"""Which values of an event are worth their place on a line, and how they read."""


class TerminalProgress:
    """A progress listener that draws one bar per stage and dataset, with rate and remaining time."""

    def __init__(self, console: Console) -> None:
        """Draw on `console`; on anything but a terminal it prints a line when a bar completes."""
        self._console = console
        self._bars: dict[str, TaskID] = {}
        self._finished: set[str] = set()
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the bars as they are."""
        self._progress.stop()

    def __call__(self, event: ProgressEvent) -> None:
        """Draw one event."""
        name = f"{event.stage} {event.label}".strip()
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=None, rate="", figures="")
        bar = self._bars[name]
        task = self._progress.tasks[self._progress.task_ids.index(bar)]
        rate = f"{task.speed:,.0f} {event.unit}/s" if task.speed else event.unit
        figures = "  ".join(
            form.format(_short(event.values[key])) for key, form in FIGURES.items() if key in event.values
        )
        self._progress.update(bar, completed=event.done, total=event.total or None, rate=rate, figures=figures)
        if not self._console.is_terminal and event.total and event.done >= event.total and name not in self._finished:
            self._finished.add(name)
            self._console.print(f"{name}: {event.done:,.0f} {event.unit} {figures}".rstrip(), highlight=False)


def _short(value: float | str) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
