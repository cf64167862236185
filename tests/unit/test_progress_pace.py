"""Pace and time left: silent while nothing can be said, and right once something can."""

import pytest

from eagle3.progress_pace import MIN_SEEN_S, WINDOW_S, Pace, duration


def watched(counts: list[float], every_s: float = 1.0, started_done: float = 0.0) -> Pace:
    pace = Pace(0.0, started_done)
    for number, done in enumerate(counts, start=1):
        pace.note(number * every_s, done)
    return pace


def test_the_first_seconds_say_nothing():
    assert watched([100, 200]).per_s() == 0
    assert watched([100, 200]).left_s(1000) is None
    assert watched([100 * number for number in range(1, int(MIN_SEEN_S) + 1)]).per_s() == 100


def test_work_that_warms_up_is_judged_by_its_later_half():
    slow_start = [0.0] * 10 + [50.0 * number for number in range(1, 11)]
    assert watched(slow_start).per_s() == 50
    assert watched(slow_start).left_s(1000) == 10


def test_only_the_last_minute_counts():
    counts = [100.0 * number for number in range(1, 101)]
    counts += [counts[-1] + 10.0 * number for number in range(1, 2 * int(WINDOW_S))]
    assert watched(counts).per_s() == pytest.approx(10)


def test_what_an_earlier_process_did_is_no_pace():
    assert watched([9_000 + 10 * number for number in range(1, 11)], started_done=9_000).per_s() == 10


def test_while_only_quick_answers_are_in_there_is_no_time_left():
    """Requests of a minute, 2000 of them under way: the few answers of the first seconds are the short ones."""
    pace = watched([5.0 * number for number in range(1, 11)])
    assert pace.left_s(20_000, under_way=2000) is None
    assert pace.left_s(20_000, under_way=50) == (20_000 - 50) / 5


def test_without_a_total_or_after_the_end_nothing_is_left():
    pace = watched([10.0 * number for number in range(1, 11)])
    assert pace.left_s(0) is None
    assert pace.left_s(100) == 0


def test_a_stop_shows():
    assert watched([100.0] * 200).per_s() == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (51.4, "51 s"), (725, "12 min 5 s"), (12_000, "3 h 20 min")]
)
def test_durations_read_well(seconds: float, text: str):
    assert duration(seconds) == text
