"""From a reply to the books: what is journaled, charged, held, looked up, and compared with the account."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal

from eagle3.errors import ProviderError
from eagle3.generation.history import ACCOUNT, History
from eagle3.generation.journal import Journal, raw_field
from eagle3.generation.ledger import Ledger, RequestKey
from eagle3.providers.base import AccountUsage, ChatProvider, GenerationRecord, PriceCap, RawReply, money_up
from eagle3.providers.classify import Billing, Outcome
from eagle3.providers.wire import Answer
from eagle3.records import FailureClass, JsonObject, Usage

LOOKUP_WAITS_S = (0.0, 0.5, 1.0, 2.0)
"""A generation may be listed some seconds after its reply."""
LOOKUPS_AT_ONCE = 20
DOUBT_POLL_S = 10.0
"""Between two looks at the account while money in doubt holds the run up."""
NOISE_USD = Decimal("1e-9")
"""Differences that the account's floating-point figure makes."""
KEPT_ERROR_BYTES = 2000
"""Of bodies that are no answer; enough to see what happened."""


class Settlement:
    """Ends requests. Each method returns when what it did is durable."""

    def __init__(self, provider: ChatProvider, journal: Journal, history: History, ledger: Ledger) -> None:
        """Work on the given books."""
        self._provider = provider
        self._journal = journal
        self._history = history
        self._ledger = ledger
        self._seen: tuple[AccountUsage, float] | None = None
        """The account's last figure, and since when it is the same."""

    async def answer(
        self, dataset: str, key: RequestKey, reply: RawReply, outcome: Outcome, cap: PriceCap, attempts: int
    ) -> bool:
        """Book the sample's answer; False when it came from the cache and its price cannot be looked up yet."""
        answer = _answer_of(outcome)
        usage, cost_usd, is_estimated = answer.usage, answer.cost_usd, False
        generation_id = answer.generation_id or reply.generation_id
        charged_usd = Decimal(0)
        resolves: list[int] = []
        paid_ids = [generation_id] if generation_id else []
        if reply.is_cache_hit:
            found = await self._find(reply.cache_source_id, LOOKUP_WAITS_S)
            if found is None:
                detail = "the cached reply's own generation is not listed"
                await self._book_attempt(dataset, key, reply, outcome, "free", Decimal(0), message=detail)
                self._ledger.release(key)
                return False
            usage, cost_usd = _usage_of(found), found.cost_usd
            paid_ids = [found.generation_id]
            lost = self._hold_of(key[0], found.generation_id)
            is_paid_here = lost is not None or self._ledger.has_paid(found.generation_id)
            if lost is not None:
                resolves = [lost[1]]
                charged_usd = Decimal(0) if self._ledger.has_paid(found.generation_id) else cost_usd
            if not is_paid_here:
                cost_usd = Decimal(0)  # another run paid
        else:
            assert usage is not None
            if cost_usd is None:
                cost_usd, is_estimated = await self._cost_of(usage, generation_id, cap)
            charged_usd = cost_usd
        entry: JsonObject = {
            "kind": "answer",
            "id": key[0],
            "attempt": key[1],
            "attempts": attempts,
            "cost_usd": f"{cost_usd:f}",
            "charged_usd": f"{charged_usd:f}",
            "is_estimated": is_estimated,
            "usage": _usage_json(usage),
            "provider": (outcome.provider if self._provider.names_providers else None) or self._provider.name,
            "generation_id": generation_id,
            "paid_ids": paid_ids,
            "resolves": resolves,
            "from_cache": reply.is_cache_hit,
            "latency_s": round(reply.elapsed_s, 4),
            **raw_field(reply.body),
        }
        place, durable = self._journal.append_later(dataset, entry)
        entry.pop("raw", None)  # the body is in the kernel's hands; thousands of answers may wait for one sync
        await durable
        self._history.apply(dataset, entry, place)
        if reply.is_cache_hit:
            self._ledger.release(key)
            for number in resolves:
                self._ledger.resolve((key[0], number), cost_usd, paid_ids[0])
        else:
            self._ledger.settle(key, charged_usd, generation_id)
        return True

    async def attempt(
        self, dataset: str, key: RequestKey, reply: RawReply, outcome: Outcome, cap: PriceCap, *, counts: bool = True
    ) -> None:
        """Book a request that brought no answer."""
        if outcome.billing is Billing.FREE:
            await self._book_attempt(dataset, key, reply, outcome, "free", Decimal(0), counts=counts)
            self._ledger.release(key)
            return
        if outcome.billing is Billing.REPORTED:
            answer = _answer_of(outcome)
            assert answer.usage is not None
            cost_usd = answer.cost_usd
            if cost_usd is None:
                cost_usd, _ = await self._cost_of(answer.usage, outcome.generation_id, cap)
            await self._book_attempt(dataset, key, reply, outcome, "charged", cost_usd, counts=counts)
            self._ledger.settle(key, cost_usd, outcome.generation_id)
            return
        found = await self._find(outcome.generation_id, LOOKUP_WAITS_S)
        if found is not None:
            await self._book_attempt(
                dataset,
                key,
                reply,
                replace(outcome, provider=outcome.provider or found.provider),
                "charged",
                found.cost_usd,
                counts=counts,
                is_lost=found.cost_usd > 0,
            )
            self._ledger.settle(key, found.cost_usd, found.generation_id)
            return
        await self._book_attempt(dataset, key, reply, outcome, "held", Decimal(0), counts=counts)
        self._ledger.hold(key, outcome.generation_id)

    async def resolve_holds(self, dataset_of: Mapping[str, str]) -> None:
        """Ask once more what the requests in doubt cost whose generation is known.

        Args:
            dataset_of: By sample id; samples that are not in it are left alone.
        """
        turns = asyncio.Semaphore(LOOKUPS_AT_ONCE)

        async def resolve(key: RequestKey, generation_id: str) -> None:
            async with turns:
                found = await self._find(generation_id, (0.0,))
            if found is None or key not in dict(self._ledger.all_holds()):
                return
            is_paid = self._ledger.has_paid(generation_id)
            entry: JsonObject = {
                "kind": "resolve",
                "id": key[0],
                "attempt": key[1],
                "charged_usd": "0" if is_paid else f"{found.cost_usd:f}",
                "provider": found.provider,
                "paid_ids": [generation_id],
            }
            await self._journal.append(dataset_of[key[0]], entry)
            self._history.apply(dataset_of[key[0]], entry)
            self._ledger.resolve(key, found.cost_usd, generation_id)

        holds = [(key, hold.generation_id) for key, hold in self._ledger.all_holds() if key[0] in dataset_of]
        await asyncio.gather(*(resolve(key, name) for key, name in holds if name is not None))

    async def settle_doubts(
        self, dataset_of: Mapping[str, str], stop: asyncio.Event, *, quiet_after_s: float, can_wait: bool
    ) -> None:
        """End holds: by their generations, else by the account once its figure has rested. Nothing may be under way.

        Args:
            dataset_of: By sample id.
            stop: Ends the waiting.
            quiet_after_s: Seconds until nothing of this run can be under way at the provider.
            can_wait: Whether to wait for the account, `quiet_after_s` and twice its lag at most.
        """
        lag_s = self._provider.usage_lag_s or 0.0
        started_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - started_s
            await self.resolve_holds(dataset_of)
            await self.reconcile(is_quiet=waited_s >= quiet_after_s, since_s=0.0)
            is_settled = not self._ledger.held_usd or self._provider.usage_lag_s is None
            if is_settled or not can_wait or waited_s > quiet_after_s + 2 * lag_s:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(DOUBT_POLL_S, max(lag_s, quiet_after_s))):
                    await stop.wait()
            if stop.is_set():
                return

    async def unsent(self, dataset: str, key: RequestKey) -> None:
        """Book an intent that was not carried out."""
        entry: JsonObject = {
            "kind": "attempt",
            "id": key[0],
            "attempt": key[1],
            "verdict": "unsent",
            "billing": "free",
            "counts": False,
            "message": "",
        }
        await self._journal.append(dataset, entry)
        self._history.apply(dataset, entry)
        self._ledger.release(key)

    async def failed(self, dataset: str, sample_id: str, failure: FailureClass, message: str, attempts: int) -> None:
        """Book a sample that ends without an answer."""
        entry: JsonObject = {
            "kind": "failed",
            "id": sample_id,
            "failure": failure.value,
            "message": message,
            "attempts": attempts,
        }
        await self._journal.append(dataset, entry)
        self._history.apply(dataset, entry)

    async def reconcile(self, *, is_quiet: bool, since_s: float) -> None:
        """Compare with the account's own figure; it can only raise what we think is spent.

        Args:
            is_quiet: Nothing of this run is under way, here or at the provider.
            since_s: Seconds since the last request was sent.
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

    async def _book_attempt(
        self,
        dataset: str,
        key: RequestKey,
        reply: RawReply,
        outcome: Outcome,
        billing: str,
        charged_usd: Decimal,
        *,
        counts: bool = True,
        is_lost: bool = False,
        message: str | None = None,
    ) -> None:
        entry: JsonObject = {
            "kind": "attempt",
            "id": key[0],
            "attempt": key[1],
            "verdict": outcome.verdict.value,
            "billing": billing,
            "charged_usd": f"{charged_usd:f}",
            "counts": counts,
            "lost": is_lost,
            "provider": outcome.provider,
            "generation_id": outcome.generation_id,
            "paid_ids": [outcome.generation_id] if billing == "charged" and outcome.generation_id else [],
            "rule": outcome.rule,
            "code": outcome.code,
            "message": outcome.message if message is None else message,
            "latency_s": round(reply.elapsed_s, 4),
            **raw_field(reply.body[-KEPT_ERROR_BYTES:]),
        }
        await self._journal.append(dataset, entry)
        self._history.apply(dataset, entry)

    async def _cost_of(self, usage: Usage, generation_id: str | None, cap: PriceCap) -> tuple[Decimal, bool]:
        """Return what a reply without a cost was charged, and whether that is an estimate at the dearest prices."""
        keeps_books = self._provider.usage_lag_s is not None
        found = await self._find(generation_id, LOOKUP_WAITS_S[:2]) if keeps_books else None
        return (found.cost_usd, False) if found is not None else (_estimate(usage, cap), True)

    def _hold_of(self, sample_id: str, generation_id: str) -> RequestKey | None:
        """Return the lost request whose answer a generation is: by id, else the oldest of unknown id."""
        holds = self._ledger.holds_of(sample_id)
        same = [key for key, hold in holds if hold.generation_id == generation_id]
        unknown = [key for key, hold in holds if hold.generation_id is None]
        return next(iter([*same, *unknown]), None)

    async def _find(self, generation_id: str | None, waits_s: tuple[float, ...]) -> GenerationRecord | None:
        if generation_id is None:
            return None
        for wait_s in waits_s:
            await asyncio.sleep(wait_s)
            try:
                found = await self._provider.find_generation(generation_id)
            except ProviderError:
                continue
            if found is not None:
                return found
        return None


def _answer_of(outcome: Outcome) -> Answer:
    assert outcome.parsed is not None
    assert outcome.parsed.answer is not None
    return outcome.parsed.answer


def _estimate(usage: Usage, cap: PriceCap) -> Decimal:
    return money_up(
        usage.prompt_tokens * cap.prompt_usd + usage.completion_tokens * cap.completion_usd + cap.request_usd
    )


def _usage_of(record: GenerationRecord) -> Usage:
    return Usage(
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        reasoning_tokens=record.reasoning_tokens,
    )


def _usage_json(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "cached_tokens": usage.cached_tokens,
    }
