"""Requests that a dead process left running: never asked again while they run, and asked last."""

import asyncio
import time
from decimal import Decimal
from pathlib import Path

import pytest

from eagle3.errors import StoppedError
from eagle3.generation import requests as requests_module
from eagle3.generation.history import History, replay
from eagle3.generation.ledger import Ledger
from tests.unit.generation.world import World, buy, prompts_of

pytestmark = pytest.mark.usefixtures("no_waiting")
QUEUE_S = 0.2
FAST = {"max_queue_s": QUEUE_S, "min_tokens_per_s": 1e9}


def killed(world: World, root: Path, **changes: float) -> tuple[History, Ledger]:
    _, _, error = asyncio.run(buy(world, root, answers_outlive_us=True, **changes))
    assert isinstance(error, StoppedError)
    assert len(world.running) == 1
    return replay(root, ["d"], Decimal(1))


def test_a_generation_that_had_begun_is_looked_up_and_its_answer_taken_from_the_cache(tmp_path):
    world = World({"a": ["slow"], "b": ["ok"]})
    _, ledger = killed(world, tmp_path)
    ((_, hold),) = [*ledger.all_holds()]
    assert hold.generation_id in world.running
    history, ledger, error = asyncio.run(buy(world, tmp_path, answers_outlive_us=True))
    assert error is None
    assert not world.asked_while_running
    assert history.by_dataset["d"].samples == 2
    assert history.paid_twice == 0
    assert (ledger.spent_usd, ledger.held_usd) == (world.bill, 0)
    assert world.looks_until_end == 0


def test_a_request_without_a_name_is_asked_again_after_its_deadline_only(tmp_path, monkeypatch):
    monkeypatch.setattr(requests_module, "RENEW_S", 0.0)
    world = World({"a": ["silent"]})
    history, _ = killed(world, tmp_path, **FAST)
    intent = history.sample(prompts_of(["a"])[0].sample_id).intent
    assert intent is not None
    for name in [*world.running]:
        world.end(name)  # which nobody can know: it has no name, and its deadline has not passed
    history, ledger, error = asyncio.run(buy(world, tmp_path, answers_outlive_us=True, **FAST))
    assert error is None
    assert time.time() - intent["time"] >= QUEUE_S
    assert history.by_dataset["d"].samples == 1
    assert abs(ledger.spent_usd - world.bill) <= Decimal("1e-8")
    assert history.paid_twice == 0


def test_a_crash_of_ours_is_no_try_of_the_provider(tmp_path, monkeypatch):
    monkeypatch.setattr(requests_module, "RENEW_S", 0.0)
    world = World({"a": ["silent", "500"]})
    killed(world, tmp_path, **FAST)
    history, _, error = asyncio.run(buy(world, tmp_path, answers_outlive_us=True, max_attempts=2, **FAST))
    assert error is None
    sample = history.sample(prompts_of(["a"])[0].sample_id)
    assert sample.answer is not None
    assert sample.attempts == 3


def test_what_was_never_asked_goes_first(tmp_path):
    names = ["a", *(f"b{number}" for number in range(30))]
    world = World({"a": ["slow"]})
    killed(world, tmp_path)
    world.script = {name: [] for name in names}
    world.requests_until_end = len(names)
    _, _, error = asyncio.run(buy(world, tmp_path, answers_outlive_us=True))
    assert error is None
    asked = [prompt for prompt, _, _ in world.requests]
    assert asked[0] == asked[-1] == "a"
    assert sorted(asked[1:-1]) == sorted(names[1:])


def test_a_paid_answer_keeps_its_bytes_in_a_later_process_and_a_free_refusal_does_not():
    entry = {"id": "a", "attempt": 1}
    intent = {"kind": "intent", **entry, "sha256": "s", "reserved_usd": "0.01", "routing": "r", "time": 5.0}
    attempt = {"kind": "attempt", **entry, "verdict": "ambiguous", "counts": True}
    endings = [
        ([{**attempt, "billing": "held"}], True),
        ([{**attempt, "billing": "held"}, {"kind": "resolve", **entry, "charged_usd": "0.004"}], True),
        ([{**attempt, "billing": "held"}, {"kind": "resolve", **entry, "charged_usd": "0"}], False),
        ([{**attempt, "billing": "charged", "charged_usd": "0.004", "lost": True}], True),
        ([{**attempt, "verdict": "retry", "billing": "free"}], False),
    ]
    for entries, is_kept in endings:
        history = History()
        for line in [intent, *entries]:
            history.apply("d", dict(line))
        assert (history.sample("a").asked_as == ("r", "s")) == is_kept, entries
