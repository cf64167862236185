"""The loop that buys answers: one limiter, one ledger, one journal for all datasets and shards of a run.

The way of one request: reserve its dearest outcome, make the intent durable, wait for a slot, send, read, make the
outcome durable, settle. Only then does the answer count. Everything here runs on one event loop; nothing is shared with
other threads but through `eagle3.generation.session`.
"""

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal

from eagle3.errors import Eagle3Error, StoppedError
from eagle3.generation.cooldown import Cooldown
from eagle3.generation.endings import again, all_rejected, budget_reached, final_failure, reason_to_halt, stranger
from eagle3.generation.history import History
from eagle3.generation.journal import Journal
from eagle3.generation.ledger import Ledger
from eagle3.generation.limiter import START_LIMIT, ProbeLimiter
from eagle3.generation.order import WaitingWork
from eagle3.generation.pacing import Admission, RetryBudget, TokenBudget
from eagle3.generation.requests import Plan, RequestWriter, Shard, Work
from eagle3.generation.settlement import Settlement
from eagle3.generation.slots import Slots
from eagle3.generation.watching import AnswerWatch
from eagle3.providers.base import ChatProvider, Endpoint, RawReply
from eagle3.providers.classify import Billing, Outcome, Verdict, classify
from eagle3.recipe import Generation
from eagle3.records import FailureClass, JsonObject, PromptRecord

BASE_DEADLINE_S = 60.0
"""Queueing and prompt processing, beside the time for the tokens."""
REJECTED_AT_START = 25
"""So many rejected samples without one answer mean that the requests are wrong, not the prompts."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
LONGEST_RETRY_AFTER_S = 120.0
OVERLOAD_CODES = frozenset({503, 529})
"""Errors that say something about how much the provider can carry."""
MIN_KNOWN_WAITS = 40
"""Answers from which the slowest wait is believed; before, only the deadline says that a lost request has ended."""
RENEW_S = 20.0
"""Requests sent later than this after their intent are noted again."""
LOOKAHEAD = (16, 256)
"""Least and most requests whose intent is synced before there is a slot, so that slots never wait for the disk."""
RECONCILE_S = 45.0
"""Between two comparisons with the account; its figure lags, so more often says nothing more."""
WORTH_WAITING_SHARE = Decimal("0.2")
"""Of the budget; when doubt holds less, the run pauses at once and settles it at its next start."""
OVER_RETRY_BUDGET_S = 120.0
"""Longest wait before a retry beyond the run's share of retries."""
PUMP_S = 0.05
"""How often waiting requests look whether the limit grew."""


class Engine:
    """Buys the answers of shards until they are final, the money ends, or somebody stops it."""

    def __init__(
        self,
        *,
        provider: ChatProvider,
        endpoints: Sequence[Endpoint],
        plan_of: Callable[[PromptRecord], Plan],
        journal: Journal,
        history: History,
        ledger: Ledger,
        settings: Generation,
        template_options: Mapping[str, bool | int | str],
        longest_answer_tokens: int,
        watch: AnswerWatch | None = None,
        token_caps: Mapping[str, int] | None = None,
    ) -> None:
        """Assemble; call `start` on the running loop.

        Args:
            provider: Where requests go.
            endpoints: Everybody who may answer, over all snapshots of this run.
            plan_of: Sampling and endpoints for one prompt.
            journal: Open for writing.
            history: Replayed.
            ledger: Replayed.
            settings: The recipe's section.
            template_options: Chat template variables for servers that take them.
            longest_answer_tokens: Largest `max_tokens` of the run.
            watch: Told of every answer; holds requests back while too much money lies in answers nobody looked at.
            token_caps: Completion tokens per dataset after which no more of its answers are bought.
        """
        self._provider = provider
        self._known_providers = {endpoint.provider.lower() for endpoint in endpoints}
        self._plan_of = plan_of
        self._journal = journal
        self.history = history
        self.ledger = ledger
        self._settings = settings
        self._watch = watch
        self.retries = RetryBudget()
        self._tokens = TokenBudget(token_caps or {}, history)
        self._longest_deadline_s = BASE_DEADLINE_S + longest_answer_tokens / settings.min_tokens_per_s
        # A server of one's own queues what it cannot serve at once; services with many providers refuse.
        start = START_LIMIT if provider.names_providers else settings.in_flight
        self.limiter = ProbeLimiter(settings.in_flight, start)
        self._cooldown = Cooldown()
        self._writer = RequestWriter(provider, journal, history, self._cooldown, template_options)
        self._settlement = Settlement(provider, journal, history, ledger)
        self._lookahead = max(LOOKAHEAD[0], min(LOOKAHEAD[1], settings.in_flight // 2))
        self._ready = WaitingWork(history.by_dataset, lambda: self.limiter.limit(time.monotonic()))
        self._num_delayed = 0
        self._shards: set[Shard] = set()
        self._active: set[asyncio.Task[None]] = set()
        self._slots = Slots(self.limiter)
        self._dataset_of: dict[str, str] = {}
        self._num_preparing = 0
        self._changed = asyncio.Event()
        self._halt: Eagle3Error | None = None
        self._halted = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._num_answered = 0
        self._num_rejected = 0

    # for the session

    async def start(self) -> None:
        """Compare with the account, then begin to send."""
        newest_s = self.history.last_time_s
        is_quiet = time.time() - newest_s > self._longest_deadline_s if self._provider.answers_outlive_us else True
        await self._settlement.reconcile(is_quiet=is_quiet, since_s=time.time() - newest_s)
        loops = (self._dispatch(), self._pump_forever(), self._reconcile_forever())
        self._loops = [asyncio.create_task(loop) for loop in loops]

    async def buy_shard(self, prompts: Sequence[PromptRecord], order: Sequence[float], bounds: Sequence[int]) -> None:
        """Return when every sample is final.

        Args:
            prompts: The samples.
            order: Rank of each among all samples of the run, lower first.
            bounds: Most prompt tokens each can have.

        Raises:
            Eagle3Error: Sending had to stop; what is done is kept.
        """
        if self._halt is not None:
            raise again(self._halt)
        shard = Shard(remaining=0, done=asyncio.get_running_loop().create_future())
        for prompt, rank, bound in zip(prompts, order, bounds, strict=True):
            sample = self.history.sample(prompt.sample_id)
            if sample.is_final:
                continue
            shard.remaining += 1
            self._dataset_of[prompt.sample_id] = prompt.dataset
            plan = self._plan_of(prompt)
            work = Work(prompt, plan, shard, rank, bound, history=sample)
            self._writer.restore(work)
            intent = sample.intent
            sent_s = float(intent["time"]) if intent is not None else None
            self._push_later(work, 0.0 if sent_s is None else self._time_to_settle_s(work, time.time() - sent_s))
        if shard.remaining:
            self._shards.add(shard)
            self._changed.set()
            await shard.done

    def halt(self, error: Eagle3Error) -> None:
        """Send nothing more; shards fail with `error` when what is under way has ended."""
        if self._halt is not None:
            return
        self._halt = error
        self._halted.set()
        self._slots.close()
        self._changed.set()

    async def drain(self, grace_s: float | None) -> None:
        """After `halt`: wait for requests under way, at most `grace_s`, then give the rest up.

        What is given up keeps its money held: the provider goes on with it.
        """
        if self._active:
            await asyncio.wait(self._active, timeout=grace_s)
        for task in self._active:
            task.cancel()
        if self._active:
            await asyncio.wait(self._active)
        self._fail_shards()

    async def finish(self) -> None:
        """Stop the loops and compare with the account a last time."""
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._fail_shards()
        await self._settlement.resolve_holds(self._dataset_of)
        await self._settlement.reconcile(is_quiet=not self._active, since_s=0.0)

    def deadline_s(self, max_tokens: int) -> float:
        """Return how long a request for so many tokens may take."""
        return BASE_DEADLINE_S + max_tokens / self._settings.min_tokens_per_s

    def notice(self) -> None:
        """Look again at what may be sent: something that held requests back has changed."""
        self._changed.set()

    @property
    def error(self) -> Eagle3Error | None:
        """Why sending stopped; None while it goes on."""
        return self._halt

    @property
    def num_active(self) -> int:
        """Requests that hold a reservation."""
        return len(self._active)

    # the order of requests

    def _time_to_settle_s(self, work: Work, elapsed_s: float) -> float:
        """Return how long to wait before a lost request is sent again.

        While the first one still runs, a second is billed too; once it ended, the response cache answers.
        """
        if not self._provider.answers_outlive_us:
            return 0.0
        deadline_s = self._deadline_s(work.plan)
        num_known = sum(tally.samples for tally in self.history.by_dataset.values())
        slowest_s = self.history.slowest_s if num_known >= MIN_KNOWN_WAITS else 0.0
        return max(0.0, (min(deadline_s, 1.5 * slowest_s + 1.0) if slowest_s else deadline_s) - elapsed_s)

    def _deadline_s(self, plan: Plan) -> float:
        return self.deadline_s(plan.sampling.max_tokens)

    def _push_later(self, work: Work, delay_s: float) -> None:
        if delay_s <= 0:
            self._ready.push(work)
            self._changed.set()
            return
        self._num_delayed += 1
        asyncio.get_running_loop().call_later(delay_s, self._push_delayed, work)

    def _push_delayed(self, work: Work) -> None:
        self._num_delayed -= 1
        self._push_later(work, 0.0)

    async def _dispatch(self) -> None:
        try:
            while True:
                await self._until_ready()
                work = self._ready.pop()
                if not self._is_wanted(work):
                    continue
                number = work.history.last_number + 1
                amount_usd = work.worst_usd
                while self._watch is not None and not self._watch.admits(self.ledger.reserved_usd, amount_usd):
                    await self._next_change()
                    if self._halt is not None:
                        return
                while not self.ledger.reserve((work.prompt.sample_id, number), amount_usd):
                    if not self._active:
                        await self._settle_doubts(amount_usd)
                        if self._halt is not None:
                            return
                        if amount_usd > self.ledger.available_usd:
                            self._push_later(work, 0.0)
                            self.halt(budget_reached(self.ledger, amount_usd))
                            return
                        continue
                    await self._next_change()
                    if self._halt is not None:
                        return
                work.history.last_number = number
                self._num_preparing += 1
                self._tokens.begun(work.plan.dataset)
                task = asyncio.create_task(self._attempt(work, number))
                self._active.add(task)
                task.add_done_callback(self._attempt_ended)
        except Eagle3Error as exc:
            self.halt(exc)

    def _is_wanted(self, work: Work) -> bool:
        """Return whether a sample is to be asked for now; one that is not was parked or given up."""
        admission = self._tokens.admission(work)
        if admission is Admission.WAIT:
            self._tokens.park(work)
        elif admission is Admission.OVER:
            for unwanted in [work, *self._tokens.give_up(work.plan.dataset)]:
                self._sample_ended(unwanted)
        return admission is Admission.GO

    async def _settle_doubts(self, amount_usd: Decimal) -> None:
        """Find out what requests in doubt cost; wait for the account when they hold much of the budget."""
        held_usd = self.ledger.held_usd
        is_worth_waiting = held_usd >= max(amount_usd, WORTH_WAITING_SHARE * self.ledger.budget_usd)
        quiet_s = 0.0
        if self._provider.answers_outlive_us:
            quiet_s = max(0.0, self._longest_deadline_s - (time.time() - self.history.last_time_s))
        await self._settlement.settle_doubts(
            self._dataset_of, self._halted, quiet_after_s=quiet_s, can_wait=is_worth_waiting
        )

    async def _reconcile_forever(self) -> None:
        """Compare with the account now and then; it can only raise what we think is spent."""
        while True:
            await asyncio.sleep(RECONCILE_S)
            try:
                await self._settlement.reconcile(is_quiet=False, since_s=0.0)
            except Eagle3Error as exc:
                self.halt(exc)
                return

    async def _until_ready(self) -> None:
        while not self._ready or self._num_preparing >= self._most_preparing or self._halt is not None:
            await self._next_change()

    @property
    def _most_preparing(self) -> int:
        """Requests for the free slots, and some for those that are freed while intents are synced."""
        return self._lookahead + max(0, int(self.limiter.limit(time.monotonic())) - self.limiter.in_flight)

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _attempt_ended(self, task: asyncio.Task[None]) -> None:
        self._active.discard(task)
        self._changed.set()
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Eagle3Error):
            self.halt(error)
        elif error is not None:
            failure = Eagle3Error(f"generation stopped on an unexpected {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.halt(failure)
        if self._halt is not None and not self._active and not isinstance(self._halt, StoppedError):
            self._fail_shards()

    def _fail_shards(self) -> None:
        if self._halt is None:
            return
        for shard in self._shards:
            if not shard.done.done():
                shard.done.set_exception(again(self._halt))
        self._shards.clear()

    async def _pump_forever(self) -> None:
        while True:
            await asyncio.sleep(PUMP_S)
            self._slots.pump()
            if self._halt is not None and not self._active and not isinstance(self._halt, StoppedError):
                self._fail_shards()

    # one request

    async def _attempt(self, work: Work, number: int) -> None:
        dataset = work.plan.dataset
        key = (work.prompt.sample_id, number)
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
            _, durable = self._journal.append_later(dataset, intent)
            self.history.apply(dataset, intent)
            await durable
            while True:
                ticket = await self._slots.acquire()
                if ticket is None:
                    self._num_preparing -= 1
                    await self._settlement.unsent(dataset, key)
                    self._push_later(work, 0.0)
                    return
                self._num_preparing -= 1
                self._changed.set()
                self._renew(dataset, intent)
                reply = await self._provider.complete(body, deadline_s=self._deadline_s(work.plan), refresh=refresh)
                outcome = _with_usage(classify(reply), reply)
                if outcome.verdict is not Verdict.RATE_LIMITED:
                    break
                self._num_preparing += 1
                self.limiter.refuse(ticket, time.monotonic(), outcome.retry_after_s)
                ticket = None
                await self._rest(outcome.retry_after_s)
            self.retries.sent()
            self._end_ticket(ticket, outcome)
            ticket = None
            await self._conclude(work, number, reply, outcome)
        except asyncio.CancelledError:
            if self.ledger.is_reserved(key):
                self.ledger.hold(key)  # replay does the same with an intent that has no outcome
            raise
        finally:
            if ticket is not None:
                self.limiter.finish(ticket)
            self._slots.pump()
            for parked in self._tokens.ended(dataset):
                self._push_later(parked, 0.0)

    def _renew(self, dataset: str, intent: JsonObject) -> None:
        """Note when a request goes out much later than it was meant to: its answer is to be expected from then on."""
        now_s = time.time()
        if now_s - float(intent["time"]) > RENEW_S:
            entry: JsonObject = {
                "kind": "renewed",
                "id": intent["id"],
                "attempt": intent["attempt"],
                "time": round(now_s, 3),
            }
            self._journal.append_later(dataset, entry)
            self.history.apply(dataset, entry)

    async def _rest(self, retry_after_s: float | None) -> None:
        """Wait as the provider asked, and a little more so that not all come back at once."""
        if not retry_after_s or self._halt is not None:
            return
        wait_s = min(retry_after_s, LONGEST_RETRY_AFTER_S) * random.uniform(1.0, 1.25)  # noqa: S311 - jitter
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._halted.wait()

    def _end_ticket(self, ticket: int, outcome: Outcome) -> None:
        if outcome.code in OVERLOAD_CODES:
            self.limiter.overload(ticket, time.monotonic())
        else:
            self.limiter.finish(ticket)
        self._slots.pump()
        if outcome.provider is not None:
            if outcome.verdict in (Verdict.RETRY, Verdict.BAD_ANSWER):
                self._cooldown.failed(outcome.provider, time.monotonic())
            elif outcome.verdict is Verdict.ANSWERED:
                self._cooldown.succeeded(outcome.provider)

    async def _conclude(self, work: Work, number: int, reply: RawReply, outcome: Outcome) -> None:
        dataset, key = work.plan.dataset, (work.prompt.sample_id, number)
        cap = work.plan.cap
        if outcome.verdict is Verdict.ANSWERED:
            unknown = stranger(outcome, self._known_providers) if self._provider.names_providers else None
            if unknown is not None:
                await self._settlement.attempt(dataset, key, reply, outcome, cap, counts=False)
                self._push_later(work, 0.0)
                self.halt(unknown)
            elif await self._settlement.answer(dataset, key, reply, outcome, cap, work.history.attempts):
                self._num_answered += 1
                self._tell_watch(work, reply, outcome)
                self._sample_ended(work)
            else:
                await self._ask_again(work, reply, replace(outcome, verdict=Verdict.AMBIGUOUS))
            return
        halting = reason_to_halt(outcome, self.ledger.spent_usd)
        await self._settlement.attempt(dataset, key, reply, outcome, cap, counts=halting is None)
        if halting is not None:
            self._push_later(work, 0.0)
            self.halt(halting)
            return
        await self._ask_again(work, reply, outcome)

    async def _ask_again(self, work: Work, reply: RawReply, outcome: Outcome) -> None:
        """Queue the sample once more, or end it when that has no sense."""
        failure = final_failure(work.history, outcome, self._settings.max_attempts)
        if failure is None:
            self._push_later(work, self._backoff_s(work, reply, outcome))
            return
        dataset, attempts = work.plan.dataset, work.history.attempts
        await self._settlement.failed(dataset, work.prompt.sample_id, failure, outcome.message, attempts)
        self._sample_ended(work)
        if failure is FailureClass.REJECTED:
            self._num_rejected += 1
            if self._num_rejected >= REJECTED_AT_START and not self._num_answered:
                self.halt(all_rejected(self._num_rejected, outcome))

    def _tell_watch(self, work: Work, reply: RawReply, outcome: Outcome) -> None:
        place = work.history.answer
        if self._watch is None or place is None:
            return
        answer = outcome.parsed.answer if outcome.parsed is not None else None
        cost_usd = answer.cost_usd if answer is not None and answer.cost_usd is not None else work.worst_usd
        self._watch.arrived(work.prompt, place, Decimal(0) if reply.is_cache_hit else cost_usd)

    def _sample_ended(self, work: Work) -> None:
        work.body = None
        work.shard.remaining -= 1
        if not work.shard.remaining:
            self._shards.discard(work.shard)
            if not work.shard.done.done():
                work.shard.done.set_result(None)

    def _backoff_s(self, work: Work, reply: RawReply, outcome: Outcome) -> float:
        longest_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**work.history.attempts)
        wait_s = random.uniform(0.0, longest_s)  # noqa: S311 - jitter
        if not self.retries.take():
            wait_s = random.uniform(0.5, 1.0) * OVER_RETRY_BUDGET_S  # noqa: S311 - jitter
        if outcome.retry_after_s is not None:
            wait_s = max(wait_s, min(outcome.retry_after_s, LONGEST_RETRY_AFTER_S))
        if outcome.verdict is Verdict.AMBIGUOUS and not work.history.was_lost:
            wait_s = max(wait_s, self._time_to_settle_s(work, reply.elapsed_s))
        return wait_s


def _with_usage(outcome: Outcome, reply: RawReply) -> Outcome:
    """Return the outcome; an answer without usage is worthless, because its length cannot be checked."""
    if outcome.verdict is Verdict.ANSWERED and outcome.billing is Billing.UNKNOWN and not reply.is_cache_hit:
        return replace(outcome, verdict=Verdict.BAD_ANSWER, message="the reply names no usage")
    return outcome
