"""Money in doubt, and its end: by looking generations up, else by the account's own figure."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from decimal import Decimal

from eagle3.errors import ProviderError
from eagle3.generation.history import ACCOUNT, History
from eagle3.generation.journal import Journal
from eagle3.generation.ledger import Ledger, RequestKey
from eagle3.providers.base import AccountUsage, ChatProvider, GenerationRecord
from eagle3.records import JsonObject

LOOKUPS_AT_ONCE = 20
DOUBT_POLL_S = 10.0
"""Between two looks at the account while money in doubt holds the run up."""
NOISE_USD = Decimal("1e-9")
"""Differences that the account's floating-point figure makes."""


class Doubts:
    """Ends holds. Each method returns when what it did is durable."""

    def __init__(self, provider: ChatProvider, journal: Journal, history: History, ledger: Ledger) -> None:
        """Work on the given books."""
        self._provider = provider
        self._journal = journal
        self._history = history
        self._ledger = ledger
        self._turns = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._ending: set[RequestKey] = set()
        self._seen: tuple[AccountUsage, float] | None = None
        """The account's last figure, and since when it is the same."""

    async def find(self, generation_id: str, waits_s: tuple[float, ...] = (0.0,)) -> GenerationRecord | None:
        """Return what the provider's books say about a generation; None while it is not listed.

        Args:
            generation_id: As named in a reply's headers.
            waits_s: Before each try.
        """
        for wait_s in waits_s:
            await asyncio.sleep(wait_s)
            with contextlib.suppress(ProviderError):
                found = await self._provider.find_generation(generation_id)
                if found is not None:
                    return found
        return None

    async def look_up(self, dataset: str, key: RequestKey, generation_id: str) -> bool:
        """End one hold with what its generation was charged; False while the generation is not listed."""
        async with self._turns:
            found = await self.find(generation_id)
        if found is None:
            return False
        if not self._ledger.is_held(key) or key in self._ending:
            return True
        self._ending.add(key)
        is_paid = self._ledger.has_paid(generation_id)
        entry: JsonObject = {
            "kind": "resolve",
            "id": key[0],
            "attempt": key[1],
            "charged_usd": "0" if is_paid else f"{found.cost_usd:f}",
            "provider": found.provider,
            "paid_ids": [generation_id],
        }
        await self._journal.append(dataset, entry)
        self._history.apply(dataset, entry)
        self._ledger.resolve(key, found.cost_usd, generation_id)
        self._ending.discard(key)
        return True

    async def look_all_up(self, dataset_of: Mapping[str, str]) -> None:
        """Ask once what the requests in doubt cost whose generation is known.

        Args:
            dataset_of: By sample id; requests of none are questions of our own.
        """
        holds = [(key, hold.generation_id) for key, hold in self._ledger.all_holds()]
        await asyncio.gather(
            *(self.look_up(dataset_of.get(key[0], ACCOUNT), key, name) for key, name in holds if name is not None)
        )

    async def settle(
        self, dataset_of: Mapping[str, str], stop: asyncio.Event, *, quiet_after_s: float, can_wait: bool
    ) -> None:
        """End holds: by their generations, else by the account once its figure has rested. Nothing may be under way.

        Args:
            dataset_of: As for `look_all_up`.
            stop: Ends the waiting.
            quiet_after_s: Seconds until nothing of this run can be under way at the provider.
            can_wait: Whether to wait for the account, `quiet_after_s` and twice its lag at most.
        """
        lag_s = self._provider.usage_lag_s or 0.0
        started_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - started_s
            await self.look_all_up(dataset_of)
            await self.reconcile(is_quiet=waited_s >= quiet_after_s, since_s=0.0)
            is_settled = not self._ledger.held_usd or self._provider.usage_lag_s is None
            if is_settled or not can_wait or waited_s > quiet_after_s + 2 * lag_s:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(DOUBT_POLL_S, max(lag_s, quiet_after_s))):
                    await stop.wait()
            if stop.is_set():
                return

    async def reconcile(self, *, is_quiet: bool, since_s: float) -> None:
        """Compare with the account's own figure; it can only raise what we think is spent.

        Args:
            is_quiet: Nothing of this run is under way, here or at the provider.
            since_s: Seconds since nothing of this run can have been under way.
        """
        lag_s = self._provider.usage_lag_s
        if lag_s is None:
            return
        try:
            account = await self._provider.account()
        except ProviderError:
            return  # the guard does not depend on this figure
        if account is None:
            return
        known = [entry for entry in self._history.baselines if entry["key_label"] == account.key_label]
        if not known:
            baseline: JsonObject = {
                "kind": "baseline",
                "key_label": account.key_label,
                "usage_usd": f"{account.usage_usd:f}",
                "spent_usd": f"{self._ledger.spent_usd:f}",
                "time": round(time.time(), 3),
            }
            await self._journal.append(ACCOUNT, baseline)
            self._history.apply(ACCOUNT, baseline)
            return
        baseline = known[-1]
        shown_usd = account.usage_usd - Decimal(baseline["usage_usd"]) + Decimal(baseline["spent_usd"]) - NOISE_USD
        rests_s = max(since_s, self._unchanged_s(account))
        is_final = is_quiet and rests_s >= lag_s and not self._ledger.num_reserved
        holds = list(self._ledger.all_holds()) if is_final else []
        before_usd = self._ledger.spent_usd
        # At once, not after the write: what is settled meanwhile must not change what the entry says.
        added_usd = self._ledger.reconcile(shown_usd, is_final=is_final)
        if added_usd or holds:
            entry: JsonObject = {
                "kind": "reconciled",
                "charged_usd": f"{added_usd:f}",
                "account_usd": f"{shown_usd:f}",
                "before_usd": f"{before_usd:f}",
                "ended_holds": [list(key) for key, _ in holds],
                "time": round(time.time(), 3),
            }
            await self._journal.append(ACCOUNT, entry)
            self._history.apply(ACCOUNT, entry)

    def _unchanged_s(self, account: AccountUsage) -> float:
        """Return how long this process has seen the account's figure as it is now."""
        now_s = time.monotonic()
        if self._seen is None or self._seen[0] != account:
            self._seen = (account, now_s)
        return now_s - self._seen[1]
