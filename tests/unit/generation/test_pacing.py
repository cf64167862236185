"""The run's share of retries, token budgets, and doubt that the account settles."""

import asyncio
from decimal import Decimal

import pytest

from eagle3.errors import BudgetReachedError
from eagle3.generation import engine as engine_module
from eagle3.generation import retrying as retrying_module
from eagle3.generation.history import replay
from eagle3.generation.pacing import FREE_RETRIES, RETRY_SHARE, RetryBudget
from tests.unit.generation.world import ENDPOINT, MAX_TOKENS, PROMPT_TOKENS, World, buy, prompts_of

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_retries_beyond_a_tenth_of_the_requests_are_slow():
    budget = RetryBudget()
    for _ in range(2000):
        budget.sent()
    allowed = round(FREE_RETRIES + RETRY_SHARE * 2000)
    assert all(budget.take() for _ in range(allowed))
    assert not budget.take()
    assert budget.num_slowed == 1
    for _ in range(20):
        budget.sent()
    assert budget.take()


def test_the_engine_slows_retries_that_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3.generation.pacing.FREE_RETRIES", 3)
    monkeypatch.setattr(retrying_module, "OVER_RETRY_BUDGET_S", 0.002)
    world = World({f"p{number}": ["500", "500"] for number in range(10)})
    history, _, error = asyncio.run(buy(world, tmp_path))
    assert error is None
    assert history.by_dataset["d"].samples == 10
    assert world.retries is not None
    assert world.retries.num_retries == 20
    assert 13 <= world.retries.num_slowed <= 17  # 3 and a tenth of up to 30 requests are free


def test_a_dataset_with_enough_tokens_asks_no_more(tmp_path):
    names = [f"p{number:03d}" for number in range(200)]
    world = World({name: ["ok"] for name in names})
    per_answer = 1 + len("p000") % 40
    history, _, error = asyncio.run(buy(world, tmp_path, token_caps={"d": 40 * per_answer}, in_flight=100))
    assert error is None
    tally = history.by_dataset["d"]
    assert 40 <= tally.samples <= 42
    assert len(world.requests) == tally.samples
    assert asyncio.run(buy(world, tmp_path, token_caps={"d": 40 * per_answer}))[2] is None
    assert len(world.requests) == tally.samples
    history, _, error = asyncio.run(buy(world, tmp_path))
    assert error is None
    assert history.by_dataset["d"].samples == 200


def test_an_answer_that_may_be_paid_for_is_fetched_although_the_tokens_are_there(tmp_path):
    world = World({"p": ["lost"], "q": ["ok"]})
    history, _, _ = asyncio.run(buy(world, tmp_path, token_caps={"d": 1}, in_flight=1))
    first = history.sample(prompts_of(["p"])[0].sample_id)
    assert first.answer is not None
    assert len(world.requests) == 2


def test_the_account_settles_what_a_crash_left_in_doubt(tmp_path):
    """All the budget is held by requests of a dead process; the account shows what they cost, and the run goes on."""
    worst_usd = PROMPT_TOKENS * ENDPOINT.prompt_usd + MAX_TOKENS * ENDPOINT.completion_usd
    world = World({f"p{number}": ["lost"] for number in range(6)})
    world.crash_after = 6
    budget = 6 * worst_usd
    asyncio.run(buy(world, tmp_path, budget))
    _, dead = replay(tmp_path, ["d"], budget)
    assert dead.available_usd < worst_usd
    world.crash_after = None
    world.cache.clear()
    history, ledger, error = asyncio.run(buy(world, tmp_path, budget))
    assert error is None or isinstance(error, BudgetReachedError)
    assert ledger.held_usd == 0
    assert abs(ledger.spent_usd - world.bill) < Decimal("1e-8")
    assert history.by_dataset["d"].samples >= 1


def test_the_account_is_compared_while_requests_run(tmp_path, monkeypatch):
    """Somebody else spends on the key: the run notices before its end and stays below the budget."""
    monkeypatch.setattr(engine_module, "RECONCILE_S", 0.0)
    world = World({f"p{number}": ["503"] * 3 for number in range(30)})
    budget = Decimal("0.01")
    asyncio.run(buy(World({}), tmp_path, budget))
    world.foreign = Decimal("0.0099")
    world.bill += world.foreign
    _, ledger, error = asyncio.run(buy(world, tmp_path, budget))
    assert isinstance(error, BudgetReachedError)
    assert ledger.unexplained_usd > Decimal("0.009")
