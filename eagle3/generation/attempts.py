"""One request, from its intent to what its end means: durable before it is sent, durable before it counts."""

import asyncio
import hashlib
import time
from collections.abc import Collection
from decimal import Decimal
from typing import Protocol

from eagle3.errors import Eagle3Error
from eagle3.generation.cooldown import Cooldown
from eagle3.generation.endings import all_rejected, final_failure, reason_to_halt, stranger
from eagle3.generation.history import History
from eagle3.generation.journal import Journal
from eagle3.generation.ledger import Ledger, RequestKey
from eagle3.generation.lost import LostRequests
from eagle3.generation.pacing import RetryBudget
from eagle3.generation.requests import RENEW_S, RequestWriter, Work, deadline_s, longest_run_s
from eagle3.generation.retrying import backoff_s, rest
from eagle3.generation.settlement import Settlement
from eagle3.generation.slots import Slots
from eagle3.generation.watching import AnswerWatch
from eagle3.providers.base import ChatProvider, RawReply
from eagle3.providers.classify import Billing, Outcome, Verdict, classify
from eagle3.recipe import Generation
from eagle3.records import FailureClass, JsonObject

REJECTED_AT_START = 25
"""So many rejected samples without one answer mean that the requests are wrong, not the prompts."""
OVERLOAD_CODES = frozenset({503, 529})
"""Errors that say something about how much the provider can carry."""
TIMEOUT_CODES = frozenset({504, 524})
"""Errors of a door that did not wait for the model behind it, which may still be at work."""
NOTE_S = 0.25
"""How often generations that have begun are noted: most answers to small prompts need no note."""


class Queue(Protocol):
    """What an attempt can ask of the engine."""

    def again(self, work: Work, delay_s: float) -> None:
        """Ask a sample again after a while."""
        ...

    def ended(self, work: Work) -> None:
        """A sample is final."""
        ...

    def changed(self) -> None:
        """Something that held others back has changed."""
        ...

    def halt(self, error: Eagle3Error) -> None:
        """Send nothing more."""
        ...


class Attempts:
    """Carries requests out. Lives on the engine's loop."""

    def __init__(
        self,
        *,
        provider: ChatProvider,
        known_providers: Collection[str],
        journal: Journal,
        history: History,
        ledger: Ledger,
        settlement: Settlement,
        writer: RequestWriter,
        slots: Slots,
        cooldown: Cooldown,
        retries: RetryBudget,
        lost: LostRequests,
        watch: AnswerWatch | None,
        settings: Generation,
        queue: Queue,
    ) -> None:
        """Work for one engine.

        Args:
            provider: Where requests go.
            known_providers: Who may answer, in lower case.
            journal: Open for writing.
            history: What happened so far.
            ledger: Holds a reservation for every request that is handed over.
            settlement: Books ends.
            writer: Builds bodies.
            slots: Say when a request may go out.
            cooldown: Told who answers well.
            retries: Of the run.
            lost: Keeps requests of unknown fate.
            watch: Told of every answer.
            settings: The recipe's section.
            queue: The engine.
        """
        self._provider = provider
        self._known_providers = known_providers
        self._journal = journal
        self._history = history
        self._ledger = ledger
        self._settlement = settlement
        self._writer = writer
        self._slots = slots
        self._cooldown = cooldown
        self._retries = retries
        self._lost = lost
        self._watch = watch
        self._settings = settings
        self._queue = queue
        self._begun: dict[RequestKey, tuple[str, str]] = {}
        """Dataset and generation of requests that were accepted and not noted yet."""
        self._stopped = asyncio.Event()
        self._num_answered = 0
        self._num_rejected = 0
        self.num_preparing = 0
        """Requests that wait for their intent's sync or for a slot."""

    def stop(self) -> None:
        """Let nobody wait for a rate limit any more."""
        self._stopped.set()

    def recall(self, work: Work) -> None:
        """Take up a sample that an earlier process asked: the same bytes, and not while its request can still run."""
        self._writer.restore(work)
        intent = work.history.intent
        if intent is None:
            self._queue.again(work, 0.0)
            return
        self._lost.follow(
            work,
            (work.prompt.sample_id, intent["attempt"]),
            intent.get("generation_id"),
            age_s=time.time() - float(intent["time"]),
            runs_s=self._longest_run_s(work),
            rest_s=0.0,
        )

    async def run(self, work: Work, number: int) -> None:
        """Carry one request out; its reservation is there, and `num_preparing` counts it."""
        dataset, key = work.plan.dataset, (work.prompt.sample_id, number)
        ticket: int | None = None
        try:
            body = await self._writer.body(work)
            intent: JsonObject = {
                "kind": "intent",
                "id": work.prompt.sample_id,
                "attempt": number,
                "sha256": hashlib.sha256(body).hexdigest(),
                "reserved_usd": f"{work.worst_usd:f}",
                "routing": work.routing_id,
                "time": round(time.time(), 3),
            }
            refresh = work.history.needs_refresh
            durable = self._journal.append_later(dataset, intent)
            self._history.apply(dataset, intent)
            await durable
            while True:
                ticket = await self._slots.acquire()
                self.num_preparing -= 1
                if ticket is None:
                    await self._settlement.unsent(dataset, key)
                    self._queue.again(work, 0.0)
                    return
                self._queue.changed()
                self._renew(dataset, intent)
                reply = await self._send(dataset, key, body, work.plan.sampling.max_tokens, refresh=refresh)
                outcome = _with_usage(classify(reply), reply)
                if outcome.verdict is not Verdict.RATE_LIMITED:
                    break
                self.num_preparing += 1
                self._slots.limiter.refuse(ticket, time.monotonic(), outcome.retry_after_s)
                ticket = None
                await rest(outcome.retry_after_s, self._stopped)
            self._retries.sent()
            self._end_ticket(ticket, outcome)
            ticket = None
            await self._conclude(work, number, reply, outcome)
        except asyncio.CancelledError:
            if self._ledger.is_reserved(key):
                self._ledger.hold(key)  # replay does the same with an intent that has no outcome
            raise
        finally:
            if ticket is not None:
                self._slots.limiter.finish(ticket)
            self._slots.pump()

    async def note_forever(self) -> None:
        """Write down which generations have begun: after a crash, the provider's books tell when they ended.

        Nothing waits for these lines; a request whose line is lost is waited for until its deadline instead.
        """
        while True:
            await asyncio.sleep(NOTE_S)
            begun, self._begun = self._begun, {}
            by_dataset: dict[str, list[list[str | int]]] = {}
            for (sample_id, number), (dataset, generation_id) in begun.items():
                by_dataset.setdefault(dataset, []).append([sample_id, number, generation_id])
            for dataset, requests in by_dataset.items():
                entry: JsonObject = {"kind": "accepted", "requests": requests}
                self._journal.note(dataset, entry)
                self._history.apply(dataset, entry)

    async def _send(self, dataset: str, key: RequestKey, body: bytes, max_tokens: int, *, refresh: bool) -> RawReply:
        def begin(generation_id: str) -> None:
            self._begun[key] = (dataset, generation_id)

        on_accepted = begin if self._provider.answers_outlive_us else None
        try:
            return await self._provider.complete(
                body, deadline_s=deadline_s(self._settings, max_tokens), refresh=refresh, on_accepted=on_accepted
            )
        finally:
            self._begun.pop(key, None)

    def _renew(self, dataset: str, intent: JsonObject) -> None:
        """Note when a request goes out later than it was meant to: it can run for as long from then on."""
        now_s = time.time()
        if now_s - float(intent["time"]) > RENEW_S:
            entry: JsonObject = {
                "kind": "renewed",
                "id": intent["id"],
                "attempt": intent["attempt"],
                "time": round(now_s, 3),
            }
            self._journal.note(dataset, entry)
            self._history.apply(dataset, entry)

    def _end_ticket(self, ticket: int, outcome: Outcome) -> None:
        if outcome.code in OVERLOAD_CODES:
            self._slots.limiter.overload(ticket, time.monotonic())
        else:
            self._slots.limiter.finish(ticket)
        self._slots.pump()
        if outcome.provider is not None:
            if outcome.verdict in (Verdict.RETRY, Verdict.BAD_ANSWER):
                self._cooldown.failed(outcome.provider, time.monotonic())
            elif outcome.verdict is Verdict.ANSWERED:
                self._cooldown.succeeded(outcome.provider)

    async def _conclude(self, work: Work, number: int, reply: RawReply, outcome: Outcome) -> None:
        dataset, key, cap = work.plan.dataset, (work.prompt.sample_id, number), work.plan.cap
        if outcome.verdict is Verdict.ANSWERED:
            unknown = stranger(outcome, self._known_providers) if self._provider.names_providers else None
            if unknown is not None:
                await self._settlement.attempt(dataset, key, reply, outcome, cap, counts=False)
                self._queue.again(work, 0.0)
                self._queue.halt(unknown)
            elif await self._settlement.answer(dataset, key, reply, outcome, cap, work.history.attempts):
                self._num_answered += 1
                self._tell_watch(work, reply, outcome)
                self._queue.ended(work)
            else:
                await self._ask_again(work, key, reply, outcome._replace(verdict=Verdict.AMBIGUOUS))
            return
        halting = reason_to_halt(outcome, self._ledger.spent_usd)
        await self._settlement.attempt(dataset, key, reply, outcome, cap, counts=halting is None)
        if halting is not None:
            self._queue.again(work, 0.0)
            self._queue.halt(halting)
            return
        await self._ask_again(work, key, reply, outcome)

    async def _ask_again(self, work: Work, key: RequestKey, reply: RawReply, outcome: Outcome) -> None:
        """Queue the sample once more, or end it when that has no sense."""
        failure = final_failure(work.history, outcome, self._settings.max_attempts)
        if failure is None:
            wait_s = backoff_s(self._retries, work.history.attempts, outcome)
            may_run = outcome.verdict is Verdict.AMBIGUOUS or outcome.code in TIMEOUT_CODES
            if not may_run or not self._ledger.is_held(key):
                self._queue.again(work, wait_s)
                return
            runs_s = self._longest_run_s(work)
            self._lost.follow(work, key, outcome.generation_id, age_s=reply.elapsed_s, runs_s=runs_s, rest_s=wait_s)
            return
        dataset, attempts = work.plan.dataset, work.history.attempts
        await self._settlement.failed(dataset, work.prompt.sample_id, failure, outcome.message, attempts)
        self._queue.ended(work)
        if failure is FailureClass.REJECTED:
            self._num_rejected += 1
            if self._num_rejected >= REJECTED_AT_START and not self._num_answered:
                self._queue.halt(all_rejected(self._num_rejected, outcome))

    def _longest_run_s(self, work: Work) -> float:
        return longest_run_s(self._provider, self._settings, work.plan.sampling.max_tokens)

    def _tell_watch(self, work: Work, reply: RawReply, outcome: Outcome) -> None:
        place = work.history.answer
        if self._watch is None or place is None:
            return
        answer = outcome.parsed.answer if outcome.parsed is not None else None
        cost_usd = answer.cost_usd if answer is not None and answer.cost_usd is not None else work.worst_usd
        self._watch.arrived(work.prompt, place, Decimal(0) if reply.is_cache_hit else cost_usd)


def _with_usage(outcome: Outcome, reply: RawReply) -> Outcome:
    """Return the outcome; an answer without usage is worthless, because its length cannot be checked."""
    if outcome.verdict is Verdict.ANSWERED and outcome.billing is Billing.UNKNOWN and not reply.is_cache_hit:
        return outcome._replace(verdict=Verdict.BAD_ANSWER, message="the reply names no usage")
    return outcome
