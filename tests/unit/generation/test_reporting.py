"""Where generation stands, as events."""

from decimal import Decimal

import pytest

from eagle3.generation.history import History, Tally
from eagle3.generation.ledger import Ledger
from eagle3.generation.reporting import MIN_KNOWN_ANSWERS, expected_total_usd, progress_events

TOTALS = {"maths": 100, "code": 50}


def tally(samples: int, cost_usd: str, failed: int = 0) -> Tally:
    return Tally(samples=samples, failed=failed, completion_tokens=10 * samples, cost_usd=Decimal(cost_usd))


def history_of(maths: Tally, code: Tally) -> History:
    return History(by_dataset={"maths": maths, "code": code}, by_provider={"B": tally(30, "1"), "A": tally(50, "2.5")})


def test_one_event_for_the_whole_and_one_per_dataset():
    history = history_of(tally(60, "3", failed=2), tally(20, "0.5"))
    ledger = Ledger(Decimal(14))
    ledger.spent_usd = Decimal("3.5")
    whole, *parts = progress_events(history, ledger, TOTALS, in_flight=7, num_refused=4)
    assert (whole.label, whole.done, whole.total) == ("", 82, 150)
    wanted = {"spent_usd": 3.5, "held_usd": 0.0, "budget_usd": 14.0, "in_flight": 7, "rate_limited": 4, "failed": 2}
    assert wanted.items() <= whole.values.items()
    assert whole.values["completion_tokens"] == 800
    assert list(whole.providers.items()) == [
        ("A", {"answers": 50, "spent_usd": 2.5}),
        ("B", {"answers": 30, "spent_usd": 1.0}),
    ]
    assert [(part.label, part.done, part.total, part.values["spent_usd"]) for part in parts] == [
        ("maths", 62, 100, 3.0),
        ("code", 20, 50, 0.5),
    ]


def test_a_single_dataset_is_the_whole():
    events = list(progress_events(History(), Ledger(Decimal(1)), {"only": 5}, in_flight=0, num_refused=0))
    assert [(event.label, event.total) for event in events] == [("", 5)]


def test_the_expected_total_takes_each_dataset_at_its_own_price():
    tallies = {"maths": tally(60, "3", failed=2), "code": tally(20, "0.5")}
    expected = expected_total_usd(3.6, tallies, TOTALS, in_flight=10)
    assert expected == pytest.approx(3.6 + 38 * 0.05 + 30 * 0.025)


def test_nothing_is_expected_while_a_dataset_is_hardly_known():
    few = {"maths": tally(60, "3"), "code": tally(MIN_KNOWN_ANSWERS - 1, "0.5")}
    assert expected_total_usd(3.5, few, TOTALS, in_flight=10) is None
    assert expected_total_usd(3.5, few, {"maths": 100, "code": MIN_KNOWN_ANSWERS - 1}, in_flight=10) is not None


def test_nothing_is_expected_while_only_the_short_answers_are_in():
    tallies = {"maths": tally(60, "3"), "code": tally(20, "0.5")}
    assert expected_total_usd(3.5, tallies, TOTALS, in_flight=81) is None
    assert expected_total_usd(3.5, tallies, TOTALS, in_flight=80) is not None
