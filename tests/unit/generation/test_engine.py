"""The engine against a scripted provider, faked at the wire: what it buys, what it pays, what it writes down."""

import asyncio
import tempfile
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.errors import BudgetReachedError, CredentialsError, CreditsExhaustedError, RunRejectedError
from eagle3.records import FailureClass
from tests.unit.generation.world import ENDPOINT, World, buy, prompts_of

pytestmark = pytest.mark.usefixtures("no_waiting")


FINE = ["ok", "null cost", "dear"]
BILLED = ["lost", "timeout", "padding", "cut", "502 billed", "empty", "unfinished"]
FREE = ["dropped", "502", "503", "429", "500", "408"]
KINDS = [*FINE, *BILLED, *FREE]
SCRIPTS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=6), st.lists(st.sampled_from(KINDS), max_size=7), min_size=1, max_size=8
)


@settings(max_examples=60)
@given(SCRIPTS, st.sampled_from([Decimal("0.0004"), Decimal(1)]))
def test_the_bill_is_covered_at_all_times_and_known_at_the_end(script, budget):
    with tempfile.TemporaryDirectory() as folder:
        world = World(script)
        history, ledger, error = asyncio.run(buy(world, Path(folder), budget))
        assert world.bill <= budget
        assert abs(ledger.spent_usd - world.bill) <= Decimal("1e-8")
        assert ledger.held_usd == 0
        finals = [history.sample(prompt.sample_id).is_final for prompt in prompts_of(list(script))]
        assert all(finals) if error is None else isinstance(error, BudgetReachedError)


@pytest.mark.parametrize("kind", ["lost", "padding", "cut"])
def test_a_lost_reply_is_fetched_from_the_cache_and_paid_once(tmp_path, kind):
    world = World({"a": [kind]})
    history, ledger, error = asyncio.run(buy(world, tmp_path))
    assert error is None
    assert ledger.spent_usd == world.bill
    first, second = (body for _, body, _ in world.requests)
    assert first == second
    sample = history.sample(prompts_of(["a"])[0].sample_id)
    assert sample.answer is not None
    entry = sample.answer.read()
    assert entry["from_cache"]
    assert Decimal(entry["cost_usd"]) == world.bill
    assert entry["usage"]["completion_tokens"] > 0


def test_an_answer_of_unknown_cost_is_charged_at_the_dearest_prices_and_marked(tmp_path):
    world = World({"a": ["unlisted"], "b": ["null cost"]})
    history, ledger, _ = asyncio.run(buy(world, tmp_path))
    unlisted, listed = (history.sample(prompt.sample_id).answer.read() for prompt in prompts_of(["a", "b"]))
    assert unlisted["is_estimated"]
    assert not listed["is_estimated"]
    tokens = unlisted["usage"]["prompt_tokens"], unlisted["usage"]["completion_tokens"]
    dearest = tokens[0] * ENDPOINT.prompt_usd + tokens[1] * ENDPOINT.completion_usd
    assert Decimal(unlisted["cost_usd"]) == Decimal(unlisted["charged_usd"]) == dearest
    assert ledger.spent_usd == dearest + Decimal(listed["cost_usd"]) > world.bill


def test_a_worthless_reply_is_not_fetched_from_the_cache_again(tmp_path):
    world = World({"a": ["empty", "ok"]})
    history, _, _ = asyncio.run(buy(world, tmp_path))
    assert [headers.get("x-openrouter-cache-clear") for _, _, headers in world.requests] == [None, "true"]
    assert history.sample(prompts_of(["a"])[0].sample_id).answer is not None


def test_refusals_by_rate_limit_are_no_attempts(tmp_path):
    world = World({"a": ["429"] * 20})
    history, _, error = asyncio.run(buy(world, tmp_path, max_attempts=1))
    assert error is None
    assert history.sample(prompts_of(["a"])[0].sample_id).attempts == 1


@pytest.mark.parametrize(
    ("kinds", "failure"),
    [
        (["500"] * 9, FailureClass.RETRIES_EXHAUSTED),
        (["dropped"] * 9, FailureClass.AMBIGUOUS),
        (["empty"] * 9, FailureClass.EMPTY),
        (["unfinished"] * 9, FailureClass.MALFORMED),
        (["400"], FailureClass.REJECTED),
    ],
)
def test_a_sample_that_never_works_becomes_a_counted_result(tmp_path, kinds, failure):
    world = World({"a": kinds, "b": ["ok"]})
    history, _, error = asyncio.run(buy(world, tmp_path, max_attempts=4))
    assert error is None
    found = history.sample(prompts_of(["a"])[0].sample_id).failure
    assert found is not None
    assert found.failure is failure
    assert history.by_dataset["d"].failed == 1
    assert history.by_dataset["d"].samples == 1


@pytest.mark.parametrize(
    ("kind", "error_class"),
    [
        ("402", CreditsExhaustedError),
        ("401", CredentialsError),
        ("404", RunRejectedError),
        ("stranger", RunRejectedError),
    ],
)
def test_what_concerns_all_requests_ends_the_run_and_keeps_the_rest(tmp_path, kind, error_class):
    names = [f"p{number}" for number in range(30)]
    world = World({name: [kind] if name == "p5" else ["ok"] for name in names})
    _, _, error = asyncio.run(buy(world, tmp_path))
    assert isinstance(error, error_class)
    world.script = {name: ["ok"] for name in names}
    world.cache.clear()
    history, _, error = asyncio.run(buy(world, tmp_path))
    assert error is None
    assert history.by_dataset["d"].samples == 30
    assert len({body for _, body, _ in world.requests}) == 30


def test_a_wrong_recipe_is_noticed_after_some_rejections(tmp_path):
    world = World({f"p{number}": ["400"] for number in range(200)})
    _, _, error = asyncio.run(buy(world, tmp_path))
    assert isinstance(error, RunRejectedError)
    assert len(world.requests) < 100


def test_finished_samples_are_not_asked_again(tmp_path):
    world = World({"a": ["ok"], "b": ["ok"]})
    asyncio.run(buy(world, tmp_path))
    asyncio.run(buy(world, tmp_path))
    assert len(world.requests) == 2


def test_a_cached_answer_that_another_run_paid_for_is_free(tmp_path):
    world = World({"a": ["ok"]})
    asyncio.run(buy(world, tmp_path / "one"))
    bill = world.foreign = world.bill
    history, ledger, _ = asyncio.run(buy(world, tmp_path / "two"))
    assert world.bill == bill
    assert ledger.spent_usd == 0
    assert history.by_dataset["d"].samples == 1


def test_spending_by_others_on_the_key_only_raises_what_we_count(tmp_path):
    world = World({"a": ["ok"]})
    asyncio.run(buy(world, tmp_path))
    own = world.bill
    world.bill += Decimal("0.25")
    _, ledger, _ = asyncio.run(buy(world, tmp_path))
    assert abs(ledger.spent_usd - own - Decimal("0.25")) < Decimal("1e-8")
    assert abs(ledger.unexplained_usd - Decimal("0.25")) < Decimal("1e-8")
