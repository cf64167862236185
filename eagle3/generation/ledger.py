"""The money of one run: what is spent, promised and in doubt. Pure; amounts are Decimal US dollars.

The law: `spent + reserved + held + the next reservation <= budget` at every admission, where a reservation is the most
its request can cost. So the bill cannot pass the budget whatever order answers, failures and crashes come in. Money in
doubt stays held until the provider says what it charged.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

RequestKey: TypeAlias = tuple[str, int]
"""(sample id, attempt): names one request of the run."""

_ZERO = Decimal(0)


@dataclass(frozen=True, slots=True)
class Hold:
    """A request that may have been billed."""

    amount_usd: Decimal
    generation_id: str | None = None
    """Known when the reply's headers arrived."""


class Ledger:
    """Reservations and their end.

    Attributes:
        budget_usd: The hard cap.
        spent_usd: Charged for certain.
        unexplained_usd: The part of `spent_usd` that only the account's own figure showed.
    """

    def __init__(self, budget_usd: Decimal) -> None:
        """Start with nothing spent."""
        self.budget_usd = budget_usd
        self.spent_usd = _ZERO
        self.unexplained_usd = _ZERO
        self._reserved: dict[RequestKey, Decimal] = {}
        self._reserved_usd = _ZERO
        self._held: dict[RequestKey, Hold] = {}
        self._held_usd = _ZERO
        self._paid_generations: set[str] = set()

    @property
    def reserved_usd(self) -> Decimal:
        """Promised to requests under way."""
        return self._reserved_usd

    @property
    def held_usd(self) -> Decimal:
        """In doubt."""
        return self._held_usd

    @property
    def available_usd(self) -> Decimal:
        """What the next reservation may be at most."""
        return self.budget_usd - self.spent_usd - self._reserved_usd - self._held_usd

    @property
    def num_reserved(self) -> int:
        """Requests under way."""
        return len(self._reserved)

    def holds_of(self, sample_id: str) -> list[tuple[RequestKey, Hold]]:
        """Return the open holds of one sample, oldest attempt first."""
        return sorted((key, hold) for key, hold in self._held.items() if key[0] == sample_id)

    def all_holds(self) -> Iterable[tuple[RequestKey, Hold]]:
        """Return every open hold."""
        return tuple(self._held.items())

    def reserve(self, key: RequestKey, amount_usd: Decimal) -> bool:
        """Promise an amount to a request; False, and no change, when the budget cannot carry it."""
        if key in self._reserved or key in self._held:
            raise ValueError(f"request {key!r} already holds money")
        if amount_usd > self.available_usd:
            return False
        self._reserved[key] = amount_usd
        self._reserved_usd += amount_usd
        return True

    def is_reserved(self, key: RequestKey) -> bool:
        """Return whether a request has an open reservation."""
        return key in self._reserved

    def is_held(self, key: RequestKey) -> bool:
        """Return whether a request is in doubt."""
        return key in self._held

    def release(self, key: RequestKey) -> None:
        """End a reservation of which nothing was charged."""
        self._reserved_usd -= self._reserved.pop(key)

    def settle(self, key: RequestKey, cost_usd: Decimal, generation_id: str | None = None) -> Decimal:
        """End a reservation with its charge; return what was charged, which is 0 for a generation paid before."""
        self.release(key)
        return self.charge(cost_usd, generation_id)

    def charge(self, cost_usd: Decimal, generation_id: str | None = None) -> Decimal:
        """Count a charge once for each generation; return what was added."""
        if generation_id is not None:
            if generation_id in self._paid_generations:
                return _ZERO
            self._paid_generations.add(generation_id)
        self.spent_usd += cost_usd
        return cost_usd

    def has_paid(self, generation_id: str) -> bool:
        """Return whether this generation was charged before."""
        return generation_id in self._paid_generations

    def hold(self, key: RequestKey, generation_id: str | None = None) -> None:
        """Keep a reservation whose request may have been billed."""
        amount_usd = self._reserved[key]
        self.release(key)
        self.restore_hold(key, amount_usd, generation_id)

    def restore_hold(self, key: RequestKey, amount_usd: Decimal, generation_id: str | None = None) -> None:
        """Take over a hold from the journal; it counts even when it passes the budget."""
        self._held[key] = Hold(amount_usd, generation_id)
        self._held_usd += amount_usd

    def resolve(self, key: RequestKey, cost_usd: Decimal, generation_id: str | None = None) -> Decimal:
        """End a hold with what was really charged; return what was added to `spent_usd`."""
        self._held_usd -= self._held.pop(key).amount_usd
        return self.charge(cost_usd, generation_id)

    def excess(self, account_spent_usd: Decimal, *, is_final: bool) -> Decimal:
        """Return what the account shows beyond what we know or suspect; never negative.

        The comparison only ever raises `spent_usd`: the account's figure may lag, and other users of the key may add to
        it.

        Args:
            account_spent_usd: The account's usage since the run began.
            is_final: True when nothing is under way and the figure had time to settle, so that holds are in it.
        """
        suspected_usd = _ZERO if is_final else self._held_usd + self._reserved_usd
        return max(_ZERO, account_spent_usd - self.spent_usd - suspected_usd)

    def reconcile(self, account_spent_usd: Decimal, *, is_final: bool) -> Decimal:
        """Charge the excess and return it; a final figure also ends every hold."""
        added_usd = self.excess(account_spent_usd, is_final=is_final)
        if is_final:
            self._held.clear()
            self._held_usd = _ZERO
        self.spent_usd += added_usd
        self.unexplained_usd += added_usd
        return added_usd
