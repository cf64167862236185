"""The law of the money, over whole processes: whatever a service does and whenever we die, the bill stays covered."""

import asyncio
import tempfile
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eagle3.errors import BudgetReachedError, CreditsExhaustedError, StoppedError
from tests.unit.generation.world import World, buy, prompts_of

KINDS = st.sampled_from(
    [
        *("ok", "dear", "null cost", "empty", "unfinished"),
        *("lost", "timeout", "cut", "padding", "502 billed"),
        *("402", "budget", "429", "500", "502", "503", "dropped"),
    ]
)
STEP = Decimal("0.00002")
ROUNDING = Decimal("1e-8")
"""Of the account's floating-point figure."""
MAX_ATTEMPTS = 20


class Buying(RuleBasedStateMachine):
    """A service with a will of its own, and processes that come and die; the books lie in one journal."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.world = World({"prompt 0": []})
        self.budget = 6 * STEP
        self.has_changed = False
        self.forgotten: set[str] = set()
        """Prompts whose answers the cache no longer has."""

    @rule(scripts=st.lists(st.lists(KINDS, min_size=1, max_size=3), min_size=2, max_size=8))
    def prompts_arrive(self, scripts: list[list[str]]):
        self.has_changed = True
        for kinds in scripts:
            self.world.script[f"prompt {len(self.world.script)}"] = [*kinds]

    @rule(steps=st.integers(1, 5))
    def the_budget_is_raised(self, steps: int):
        self.budget += steps * STEP
        self.has_changed = True

    @precondition(lambda self: self.world.cache)
    @rule()
    def the_cache_forgets(self):
        self.world.cache.clear()
        self.forgotten |= {*self.world.bought}

    @precondition(lambda self: self.has_changed)
    @rule(crash_after=st.none() | st.integers(1, 12))
    def a_process_runs(self, crash_after: int | None):
        self.has_changed = False
        self.world.crash_after = None if crash_after is None else len(self.world.requests) + crash_after
        _, ledger, error = asyncio.run(buy(self.world, self.root, self.budget, max_attempts=MAX_ATTEMPTS))
        assert error is None or isinstance(error, (BudgetReachedError, CreditsExhaustedError, StoppedError))
        if not isinstance(error, StoppedError):
            assert ledger.held_usd == 0
            assert abs(ledger.spent_usd - self.world.bill) <= ROUNDING

    @invariant()
    def the_bill_never_passes_the_budget(self):
        assert self.world.bill <= self.budget

    @invariant()
    def no_answer_is_paid_twice_while_the_cache_remembers(self):
        twice = [prompt for prompt, count in self.world.bought.items() if count > 1]
        assert {*twice} <= self.forgotten

    def teardown(self):
        self.world.crash_after = None
        for kinds in self.world.script.values():
            kinds.clear()
        history, ledger, error = asyncio.run(buy(self.world, self.root, Decimal(1), max_attempts=MAX_ATTEMPTS))
        assert error is None
        assert all(history.sample(prompt.sample_id).is_final for prompt in prompts_of(list(self.world.script)))
        assert abs(ledger.spent_usd - self.world.bill) <= ROUNDING
        assert ledger.held_usd == 0
        self.folder.cleanup()


@pytest.mark.usefixtures("no_waiting")
class TestBuying(Buying.TestCase):
    """At least 2000 steps a run."""

    settings = settings(max_examples=56, stateful_step_count=45, deadline=None, derandomize=True)
