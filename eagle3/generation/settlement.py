"""From a reply to the books: what is journaled, charged, released or held."""

from decimal import Decimal

from eagle3.generation.doubts import Doubts
from eagle3.generation.history import History
from eagle3.generation.journal import Journal
from eagle3.generation.ledger import Ledger, RequestKey
from eagle3.providers.base import ChatProvider, GenerationRecord, PriceCap, RawReply, money_up
from eagle3.providers.classify import Billing, Outcome
from eagle3.providers.wire import Answer
from eagle3.records import FailureClass, JsonObject, Usage

LOOKUP_WAITS_S = (0.0, 0.5, 1.0, 2.0)
"""A generation may be listed some seconds after its reply."""
KEPT_ERROR_BYTES = 2000
"""Of bodies that are no answer; enough to see what happened."""


class Settlement:
    """Ends requests. Each method returns when what it did is durable."""

    def __init__(
        self, provider: ChatProvider, journal: Journal, history: History, ledger: Ledger, doubts: Doubts
    ) -> None:
        """Work on the given books."""
        self._provider = provider
        self._journal = journal
        self._history = history
        self._ledger = ledger
        self._doubts = doubts

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
            "usage": usage._asdict(),
            "provider": (outcome.provider if self._provider.names_providers else None) or self._provider.name,
            "generation_id": generation_id,
            "paid_ids": paid_ids,
            "resolves": resolves,
            "from_cache": reply.is_cache_hit,
            "latency_s": round(reply.elapsed_s, 4),
            "reply": reply.body,
        }
        place = await self._journal.append(dataset, entry)
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
                outcome._replace(provider=outcome.provider or found.provider),
                "charged",
                found.cost_usd,
                counts=counts,
                is_lost=found.cost_usd > 0,
            )
            self._ledger.settle(key, found.cost_usd, found.generation_id)
            return
        await self._book_attempt(dataset, key, reply, outcome, "held", Decimal(0), counts=counts)
        self._ledger.hold(key, outcome.generation_id)

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
            "raw": reply.body[-KEPT_ERROR_BYTES:],
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
        return None if generation_id is None else await self._doubts.find(generation_id, waits_s)


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
