"""Where work stands, for people: a block that is drawn anew on a terminal, and a calm line now and then in a log."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from eagle3.progress import ProgressEvent
from eagle3.progress_pace import Pace, duration

FIGURES: dict[str, str] = {
    "loss": "loss {}",
    "acceptance_length": "acceptance {}",
    "tokens_per_s": "{} tok/s",
}
"""Which values of an event, beside money and requests, are worth their place on a line, and how they read."""
FIRST_LINE_S = 10.0
"""Where there is no terminal: short work gets no line before its last."""
LINE_S = 30.0
"""Between two lines about the same work where there is no terminal."""
MAX_PARTS = 12
"""Datasets drawn at once; those that are done go first."""


@dataclass(slots=True)
class _Bar:
    """One count that grows, as last heard of."""

    event: ProgressEvent
    pace: Pace
    finished_s: float | None = None
    printed_s: float = 0.0

    @property
    def is_done(self) -> bool:
        return 0 < self.event.total <= self.event.done


class TerminalProgress:
    """A progress listener; safe to call from several threads.

    Shows one block for the stage at work: how much is done, how fast, how long it takes, what it costs, and its parts.
    A finished stage stays above as it ended.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        """Draw on `console`; on anything but a terminal print a line every half minute and one when work ends."""
        self._console = console
        self._clock = clock
        self._lock = RLock()
        self._stages: dict[str, dict[str, _Bar]] = {}
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=4, vertical_overflow="crop", screen=False
        )

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the last block as it is; in a log, say how far unfinished work came."""
        if self._console.is_terminal:
            self._live.transient = not self._stages  # nothing was to be done
            self._live.stop()
            return
        with self._lock:
            for bars in self._stages.values():
                for bar in _heads(bars):
                    if not bar.is_done and bar.event.total:
                        self._print_line(bar, self._clock())

    def __call__(self, event: ProgressEvent) -> None:
        """Take one event."""
        now_s = self._clock()
        with self._lock:
            bars = self._stages.setdefault(event.stage, {})
            bar = bars.get(event.label)
            if bar is None:
                bar = bars[event.label] = _Bar(event, Pace(now_s, event.done))
                bar.printed_s = now_s - LINE_S + FIRST_LINE_S
            bar.event = event
            bar.pace.note(now_s, event.done)
            is_end = bar.is_done and bar.finished_s is None
            if is_end:
                bar.finished_s = now_s
            if self._console.is_terminal:
                self._settle(event.stage)
            elif bar in _heads(bars) and (is_end or (not bar.is_done and now_s - bar.printed_s >= LINE_S)):
                self._print_line(bar, now_s)

    def _settle(self, current: str) -> None:
        """Move the stages that ended before the current one out of the part that is drawn anew."""
        for stage in [name for name in self._stages if name != current]:
            if all(bar.is_done for bar in self._stages[stage].values()):
                self._console.print(_block(self._stages.pop(stage), MAX_PARTS))

    def _render(self) -> RenderableType:
        with self._lock:
            if not self._stages:
                return Text("starting")
            return Group(*(_block(bars, MAX_PARTS) for bars in self._stages.values()))

    def _print_line(self, bar: _Bar, now_s: float) -> None:
        bar.printed_s = now_s
        self._console.print(_line(bar), highlight=False, markup=False, soft_wrap=True)


def _heads(bars: dict[str, _Bar]) -> Sequence[_Bar]:
    """Return the bars that speak for the stage: the one without a label, or else all."""
    return [bars[""]] if "" in bars else list(bars.values())


def _name(event: ProgressEvent) -> str:
    return f"{event.stage} {event.label}".strip()


def _count(event: ProgressEvent) -> str:
    return f"{event.done:,.0f} of {event.total:,.0f}" if event.total else f"{event.done:,.0f}"


def _percent(event: ProgressEvent) -> str:
    return f"{int(100 * event.done / event.total)} %" if event.total else ""


def _under_way(event: ProgressEvent) -> float:
    value = event.values.get("in_flight", 0)
    return value if isinstance(value, (int, float)) else 0.0


def _per_s(bar: _Bar) -> str:
    seconds = (bar.finished_s or 0.0) - bar.pace.started_s
    per_s = bar.pace.gained / seconds if bar.finished_s is not None and seconds > 0 else bar.pace.per_s()
    return f"{per_s:,.3g}/s" if 0 < per_s < 10 else f"{per_s:,.0f}/s" if per_s else ""


def _time(bar: _Bar) -> str:
    if bar.finished_s is not None:
        return f"in {duration(bar.finished_s - bar.pace.started_s)}"
    left_s = bar.pace.left_s(bar.event.total, _under_way(bar.event))
    return f"{duration(left_s)} left" if left_s is not None else ""


def _usd(value: object) -> str:
    """Return dollars for people; amounts below a cent with the digits that still say something."""
    amount = float(value) if isinstance(value, (int, float)) else 0.0
    return f"${amount:,.2f}" if amount >= 1 or not amount else f"${amount:.4f}" if amount >= 0.01 else f"${amount:.6f}"


def _money(event: ProgressEvent) -> Text | None:
    """Say what was spent, what is allowed, and what it will be."""
    values = event.values
    if "budget_usd" not in values:
        return Text(f"{_usd(values['spent_usd'])} spent") if "spent_usd" in values else None
    text = Text(f"{_usd(values['spent_usd'])} of {_usd(values['budget_usd'])} spent")
    if values.get("held_usd"):
        text.append(f", {_usd(values['held_usd'])} in doubt")
    expected, budget = values.get("expected_usd"), values["budget_usd"]
    if isinstance(expected, float) and isinstance(budget, float):
        if expected > budget:
            text.append(f", about {_usd(expected)} in all: the budget ends before the run does", style="bold red")
        elif event.done < event.total:
            text.append(f", about {_usd(expected)} in all")
    return text


def _state(event: ProgressEvent) -> Text | None:
    """Say how the requests fare, and other figures of the stage."""
    values = event.values
    parts = [Text(form.format(_short(values[key]))) for key, form in FIGURES.items() if key in values]
    if "in_flight" in values:
        parts.append(Text(f"{_short(values['in_flight'])} under way"))
    if "rate_limited" in values:
        parts.append(Text(f"{_short(values['rate_limited'])} refused"))
    if "failed" in values:
        parts.append(Text(f"{_short(values['failed'])} failed", style="red" if values["failed"] else ""))
    return Text(", ").join(parts) if parts else None


def _short(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else value


def _line(bar: _Bar) -> str:
    """Return one line for a log."""
    event = bar.event
    percent = f" ({_percent(event)})" if event.total and not bar.is_done else ""
    figures = [_per_s(bar).replace("/s", " per s"), _time(bar)]
    notes = [str(note) for note in (_money(event), _state(event)) if note is not None]
    head = f"{_name(event)}: {_count(event)} {event.unit}{percent}"
    return "; ".join([", ".join([head, *filter(None, figures)]), *notes])


def _grid() -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, min_width=14, max_width=28, overflow="ellipsis")
    grid.add_column(ratio=1, min_width=8)
    for width in (15, 5, 9, 9):  # the usual widths, so that the rows of all tables stand below one another
        grid.add_column(no_wrap=True, min_width=width, justify="right")
    return grid


def _block(bars: dict[str, _Bar], max_parts: int) -> RenderableType:
    """Return the picture of one stage: its bar, its figures, its parts, its providers."""
    heads = _heads(bars)
    grid = _grid()
    for bar in heads:
        event = bar.event
        picture = ProgressBar(total=event.total or None, completed=event.done, pulse=not event.total)
        grid.add_row(_name(event), picture, f"{_count(event)} {event.unit}", _percent(event), _per_s(bar), _time(bar))
    lines: list[RenderableType] = [grid]
    for bar in heads:
        lines += [Text("  ") + note for note in (_money(bar.event), _state(bar.event)) if note is not None]
    parts = [bar for label, bar in bars.items() if label] if "" in bars else []
    if parts:
        lines.append(_parts(parts, max_parts))
    providers = heads[0].event.providers
    if providers:
        lines.append(_providers(providers))
    return Group(*lines)


def _parts(bars: Sequence[_Bar], most: int) -> RenderableType:
    unfinished_first = sorted(bars, key=lambda bar: bar.is_done)
    shown = [bar for bar in bars if bar in unfinished_first[:most]]
    grid = _grid()
    for bar in shown:
        event = bar.event
        tokens = event.values.get("completion_tokens")
        picture = ProgressBar(total=event.total or None, completed=event.done)
        grid.add_row(
            f"  {event.label}",
            picture,
            _count(event),
            _percent(event),
            f"{_metric(tokens)} tok" if isinstance(tokens, int) else "",
            _usd(event.values["spent_usd"]) if "spent_usd" in event.values else "",
        )
    hidden = [bar for bar in bars if bar not in shown]
    if not hidden:
        return grid
    return Group(grid, Text(f"  and {len(hidden)} more, of which {sum(bar.is_done for bar in hidden)} are done"))


def _providers(providers: Mapping[str, Mapping[str, float | int | str]]) -> RenderableType:
    grid = _grid()
    total = sum(int(figures["answers"]) for figures in providers.values())
    for name, figures in providers.items():
        answers = int(figures["answers"])
        share = f"{100 * answers / total:.0f} %" if total else ""
        picture = ProgressBar(total=total or 1, completed=answers)
        grid.add_row(f"  by {name}", picture, f"{answers:,} answers", share, "", _usd(figures["spent_usd"]))
    return grid


def _metric(number: int) -> str:
    """Return a large count for people: 950, 41.3k, 3.2M."""
    for size, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
