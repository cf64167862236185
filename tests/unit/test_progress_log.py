import json
from pathlib import Path

import pytest

from eagle3.progress import ProgressEvent
from eagle3.progress_log import MIN_INTERVAL_S, ProgressLog, active_seconds, read_progress


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def event(done: float, label: str = "", total: float = 100) -> ProgressEvent:
    return ProgressEvent(stage="generation", label=label, done=done, total=total, values={"spent_usd": 0.5})


def logged(path: Path) -> list[tuple[str, float]]:
    return [(entry.event.label, entry.event.done) for entry in read_progress(path)]


def test_events_come_back_as_they_were(tmp_path):
    clock = Clock()
    with ProgressLog(tmp_path / "progress.jsonl", clock) as log:
        log(event(1))
    (entry,) = read_progress(tmp_path / "progress.jsonl")
    assert entry.event == event(1)
    assert entry.time == 1000.0


def test_a_flood_is_thinned_per_stage_and_label(tmp_path):
    clock = Clock()
    with ProgressLog(tmp_path / "progress.jsonl", clock) as log:
        for step in range(100):
            clock.now += MIN_INTERVAL_S / 10
            log(event(step, "code", total=0))
            log(event(step, "chat", total=0))
    done = logged(tmp_path / "progress.jsonl")
    assert len(done) <= 2 * 12
    assert {label for label, _ in done} == {"code", "chat"}


def test_the_last_event_of_every_kind_is_kept(tmp_path):
    clock = Clock()
    with ProgressLog(tmp_path / "progress.jsonl", clock) as log:
        for step in range(5):
            log(event(step, "code"))
            log(event(step, "chat"))
    done = logged(tmp_path / "progress.jsonl")
    assert ("code", 4) in done
    assert ("chat", 4) in done


def test_a_finished_count_is_written_at_once(tmp_path):
    clock = Clock()
    log = ProgressLog(tmp_path / "progress.jsonl", clock)
    log(event(1))
    log(event(100))
    assert logged(tmp_path / "progress.jsonl")[-1] == ("", 100)
    log.close()
    log.close()
    log(event(3))
    assert len(logged(tmp_path / "progress.jsonl")) == 2


def test_a_torn_line_costs_only_itself(tmp_path):
    path = tmp_path / "progress.jsonl"
    with ProgressLog(path, Clock()) as log:
        log(event(1))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"time": 12')
    assert logged(path) == [("", 1)]
    with ProgressLog(path, Clock()) as log:
        log(event(2))
    assert logged(path) == [("", 1), ("", 2)]


@pytest.mark.parametrize("line", ["[]", "{}", "null", '{"time": 1}', '{"stage": "x", "done": 1, "total": 2}', "\udcff"])
def test_foreign_lines_are_skipped(tmp_path, line):
    path = tmp_path / "progress.jsonl"
    path.write_bytes(line.encode("utf-8", "surrogateescape") + b"\n")
    assert logged(path) == []


def test_a_log_that_was_never_written_has_no_events(tmp_path):
    assert read_progress(tmp_path / "progress.jsonl") == ()


def test_lines_without_the_start_of_their_process_are_readable(tmp_path):
    path = tmp_path / "progress.jsonl"
    lines = [{"time": when, "stage": "audit", "done": when, "total": 9} for when in (1.0, 3.5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert list(active_seconds(read_progress(path))) == [0.0, 2.5]


def test_time_between_two_processes_does_not_count(tmp_path):
    path = tmp_path / "progress.jsonl"
    clock = Clock()
    for process in range(2):
        with ProgressLog(path, clock, process_started=process) as log:
            for step in range(3):
                clock.now += 2
                log(event(step))
        clock.now += 9000
    assert list(active_seconds(read_progress(path))) == [0, 2, 4, 4, 6, 8]


def test_processes_that_write_at_the_same_time_both_work(tmp_path):
    path = tmp_path / "progress.jsonl"
    clock = Clock()
    with ProgressLog(path, clock, process_started=1) as one, ProgressLog(path, clock, process_started=2) as other:
        for step in range(3):
            clock.now += 2
            (one if step % 2 else other)(event(step))
    assert list(active_seconds(read_progress(path))) == [0, 2, 4]


def test_a_long_silence_of_one_process_is_work(tmp_path):
    path = tmp_path / "progress.jsonl"
    clock = Clock()
    with ProgressLog(path, clock) as log:
        log(event(1))
        clock.now += 500
        log(event(2))
    assert list(active_seconds(read_progress(path))) == [0, 500]
