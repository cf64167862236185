"""What a person sees: on a terminal of 100 columns, and in a log."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from eagle3.progress import ProgressEvent
from eagle3.terminal import TerminalProgress

CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def generation(done: int, **changes: Any) -> ProgressEvent:
    values = {"spent_usd": 3.1, "held_usd": 0.0, "budget_usd": 14.0, "in_flight": 300, "rate_limited": 12, "failed": 0}
    providers = {
        "Northwind": {"answers": done // 4, "spent_usd": 2.0},
        "Lakeside": {"answers": 3 * done // 4, "spent_usd": 1.1},
    }
    return ProgressEvent(stage="generation", done=done, total=20_000, values={**values, **changes}, providers=providers)


def part(label: str, done: int, total: int = 500) -> ProgressEvent:
    values = {"spent_usd": 0.25, "failed": 0, "completion_tokens": 41_300}
    return ProgressEvent(stage="generation", label=label, done=done, total=total, values=values)


def drawn(*events: ProgressEvent, width: int = 100) -> list[str]:
    """Return the lines of the last frame, of events one second apart."""
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, force_terminal=True, width=width, height=40)
    with TerminalProgress(console, clock) as progress:
        for event in events:
            clock.now_s += 1.0
            progress(event)
        file.seek(0)
        file.truncate()
    lines = CONTROLS.sub("", file.getvalue()).replace("\r", "\n").split("\n")
    return [line.rstrip() for line in lines if line.strip()]


def logged(*events: ProgressEvent, every_s: float = 1.0) -> list[str]:
    """Return the lines that a log gets."""
    file, clock = io.StringIO(), Clock()
    with TerminalProgress(Console(file=file, width=60), clock) as progress:
        for event in events:
            clock.now_s += every_s
            progress(event)
    return file.getvalue().splitlines()


def test_a_terminal_shows_progress_time_and_spend_of_the_whole_and_of_its_parts():
    parts = [part("maths", 159), part("code", 500)]
    lines = drawn(*parts, *(generation(100 * second) for second in range(1, 21)))
    assert all(len(line) <= 100 for line in lines)
    head = re.sub("[━╸╺]+", "#", lines[0])
    assert re.fullmatch(r"generation +# +2,000 of 20,000 samples +10 % +100/s +3 min 0 s left", head), head
    assert lines[1].strip() == "$3.10 of $14.00 spent"
    assert lines[2].strip() == "300 under way, 12 refused, 0 failed"
    found = {line.split()[0]: re.sub("[━╸╺]+", "#", line) for line in lines[3:5]}
    assert re.fullmatch(r" +maths +# +159 of 500 +31 % +41.3k tok +\$0.2500", found["maths"])
    assert re.fullmatch(r" +code +# +500 of 500 +100 % +41.3k tok +\$0.2500", found["code"])
    assert "by Northwind" in lines[5]
    assert re.search(r"500 answers +25 % +\$2.00$", lines[5])
    assert re.search(r"1,500 answers +75 % +\$1.10$", lines[6])


@pytest.mark.parametrize("width", [80, 100, 160])
def test_nothing_is_cut_off(width: int):
    lines = drawn(*(generation(100 * second) for second in range(1, 11)), part("science", 499), width=width)
    assert not any("…" in line for line in lines)
    assert "of 20,000 samples" in lines[0]
    assert lines[0].endswith("left")


def test_the_first_seconds_promise_nothing():
    quick = [generation(3 * second, in_flight=2000) for second in range(1, 31)]
    assert "left" not in drawn(*quick)[0]
    assert "left" in drawn(*quick, generation(2100, in_flight=2000))[0]


def test_a_budget_that_will_not_do_is_said_before_it_ends():
    fine = drawn(generation(100, expected_usd=13.5))[1]
    assert fine.strip() == "$3.10 of $14.00 spent, about $13.50 in all"
    short = drawn(generation(100, expected_usd=17.9, held_usd=0.5))[1]
    assert "$0.5000 in doubt, about $17.90 in all: the budget ends before the run does" in short


def test_money_below_a_cent_keeps_its_digits():
    assert "$0.000032 of $14.00 spent" in drawn(generation(1, spent_usd=3.2e-5))[1]


def test_many_parts_leave_room_for_those_at_work():
    events = [part(f"done{number}", 500) for number in range(20)] + [part("open", 3)]
    lines = drawn(generation(100), *events)
    assert any(line.split()[0] == "open" for line in lines)
    assert any(line.strip() == "and 9 more, of which 9 are done" for line in lines)


def test_a_finished_stage_stays_and_the_next_one_is_drawn():
    done = ProgressEvent(stage="audit", done=5, total=5, unit="shards")
    lines = drawn(done, ProgressEvent(stage="training", done=64, total=128, unit="steps", values={"loss": 9.125}))
    assert [line.split()[0] for line in lines] == ["training", "loss"]
    file = io.StringIO()
    with TerminalProgress(Console(file=file, force_terminal=True, width=100), Clock()) as progress:
        progress(done)
        progress(ProgressEvent(stage="training", done=1, total=128, unit="steps"))
    assert "5 of 5 shards" in file.getvalue()


def test_before_the_first_figures_it_says_that_it_starts_and_leaves_nothing_when_there_was_nothing_to_do():
    file = io.StringIO()
    with TerminalProgress(Console(file=file, force_terminal=True, width=100), Clock()):
        pass
    assert "starting" in file.getvalue()
    assert file.getvalue().endswith("\x1b[1A\x1b[2K"), "one line up, and erased"


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end():
    events = [generation(50 * second) for second in range(1, 71)]
    lines = logged(*events)
    assert len(lines) == 3, "after 10 s, then every 30 s, and where it stopped"
    assert lines[0].startswith("generation: 550 of 20,000 samples (2 %), 50 per s, 6 min 29 s left; $3.10 of $14.00")
    assert lines[0].endswith("; 300 under way, 12 refused, 0 failed")
    assert lines[-1].startswith("generation: 3,500 of 20,000 samples")


def test_short_work_gets_one_line_in_a_log():
    steps = [ProgressEvent(stage="audit", done=done, total=5, unit="shards") for done in range(6)]
    assert logged(*steps) == ["audit: 5 of 5 shards, 1 per s, in 5 s"]


def test_parts_of_a_stage_get_no_lines_of_their_own():
    assert len(logged(generation(1), part("maths", 500), part("code", 500), generation(20_000), every_s=0.1)) == 1


def test_parts_without_a_whole_speak_for_themselves():
    prompts = [
        ProgressEvent(stage="prompts", label=name, done=7, total=7, unit="prompts") for name in ("maths", "code")
    ]
    assert [line.split(",")[0] for line in logged(*prompts)] == [
        "prompts maths: 7 of 7 prompts",
        "prompts code: 7 of 7 prompts",
    ]
