"""The law of the ledger: whatever happens in whatever order, the true bill never passes the budget."""

from decimal import Decimal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from eagle3.generation.ledger import Ledger, RequestKey

CENT = Decimal("0.01")
AMOUNTS = st.integers(1, 40).map(lambda cents: cents * CENT)
SHARES = st.integers(0, 100).map(lambda percent: Decimal(percent) / 100)
BUDGET = Decimal(1)


class Spending(RuleBasedStateMachine):
    """A provider that bills what it likes up to the reservation, and a client that knows only what replies tell."""

    open_requests = Bundle("open_requests")
    doubtful = Bundle("doubtful")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(BUDGET)
        self.bill = Decimal(0)
        self.hidden: dict[RequestKey, Decimal] = {}
        self.count = 0

    @rule(target=open_requests, amount=AMOUNTS)
    def send(self, amount: Decimal):
        self.count += 1
        key = (f"sample-{self.count}", 1)
        before = self.ledger.available_usd
        if self.ledger.reserve(key, amount):
            return (key, amount)
        assert amount > before
        return None

    @rule(request=consumes(open_requests), share=SHARES)
    def answered(self, request, share: Decimal):
        if request is not None:
            self.bill += request[1] * share
            self.ledger.settle(request[0], request[1] * share, f"gen-{request[0][0]}")

    @rule(request=consumes(open_requests))
    def refused_before_generation(self, request):
        if request is not None:
            self.ledger.release(request[0])

    @rule(target=doubtful, request=consumes(open_requests), share=SHARES, has_id=st.booleans())
    def lost(self, request, share: Decimal, has_id: bool):
        if request is None:
            return None
        self.bill += request[1] * share
        self.hidden[request[0]] = request[1] * share
        self.ledger.hold(request[0], f"gen-{request[0][0]}" if has_id else None)
        return request[0]

    @rule(key=consumes(doubtful))
    def looked_up(self, key):
        if key is not None and key in self.hidden:
            self.ledger.resolve(key, self.hidden.pop(key), f"gen-{key[0]}")

    @rule(lag=SHARES)
    def compared_with_a_late_account(self, lag: Decimal):
        self.ledger.reconcile(self.bill * lag, is_final=False)

    @rule()
    def compared_when_all_is_quiet(self):
        if not self.ledger.num_reserved:
            self.ledger.reconcile(self.bill, is_final=True)
            self.hidden.clear()
            assert self.ledger.spent_usd == self.bill

    @invariant()
    def the_bill_is_covered(self):
        assert self.bill <= BUDGET
        assert self.bill <= self.ledger.spent_usd + self.ledger.held_usd
        assert self.ledger.spent_usd + self.ledger.held_usd + self.ledger.reserved_usd <= BUDGET

    def teardown(self):
        if not self.ledger.num_reserved:
            self.ledger.reconcile(self.bill, is_final=True)
            assert self.ledger.spent_usd == self.bill
            assert self.ledger.held_usd == 0


Spending.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)
TestSpending = Spending.TestCase


def test_a_reservation_beyond_the_budget_changes_nothing():
    ledger = Ledger(BUDGET)
    assert ledger.reserve(("a", 1), BUDGET)
    assert not ledger.reserve(("b", 1), CENT)
    assert ledger.available_usd == 0
    with pytest.raises(ValueError, match="already holds money"):
        ledger.reserve(("a", 1), CENT)


def test_one_generation_is_charged_once():
    ledger = Ledger(BUDGET)
    ledger.reserve(("a", 1), CENT)
    ledger.hold(("a", 1), "gen")
    assert ledger.resolve(("a", 1), CENT, "gen") == CENT
    assert ledger.charge(CENT, "gen") == 0
    assert ledger.spent_usd == CENT


def test_reconciliation_only_raises_and_knows_what_is_held():
    ledger = Ledger(BUDGET)
    ledger.reserve(("a", 1), 10 * CENT)
    ledger.hold(("a", 1))
    assert ledger.reconcile(8 * CENT, is_final=False) == 0
    assert ledger.reconcile(12 * CENT, is_final=False) == 2 * CENT
    assert ledger.reconcile(5 * CENT, is_final=True) == 3 * CENT
    assert (ledger.spent_usd, ledger.held_usd) == (5 * CENT, 0)
    assert ledger.reconcile(Decimal(0), is_final=True) == 0
    assert ledger.spent_usd == 5 * CENT
