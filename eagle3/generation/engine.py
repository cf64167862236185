"""The loop that buys answers: one limiter, one ledger, one journal for all datasets and shards of a run.

The way of one request: reserve its dearest outcome, make the intent durable, wait for a slot, send, read, make the
outcome durable, settle. Only then does the answer count. This module decides who is next and whether the money carries
it; `attempts` carries one request out, `lost` keeps those of unknown fate, `doubts` finds out what they cost.
Everything runs on one event loop; nothing is shared with other threads but through `eagle3.generation.session`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal

from eagle3.errors import Eagle3Error, StoppedError
from eagle3.generation.attempts import Attempts
from eagle3.generation.cooldown import Cooldown
from eagle3.generation.doubts import Doubts
from eagle3.generation.endings import again, budget_reached
from eagle3.generation.history import History
from eagle3.generation.journal import Journal
from eagle3.generation.ledger import Ledger
from eagle3.generation.limiter import START_LIMIT, ProbeLimiter
from eagle3.generation.lost import LostRequests
from eagle3.generation.order import WaitingWork
from eagle3.generation.pacing import Admission, RetryBudget, TokenBudget
from eagle3.generation.requests import Plan, RequestWriter, Shard, Work, longest_run_s
from eagle3.generation.settlement import Settlement
from eagle3.generation.slots import Slots
from eagle3.generation.watching import AnswerWatch
from eagle3.providers.base import ChatProvider, Endpoint
from eagle3.recipe import Generation
from eagle3.records import PromptRecord

LOOKAHEAD = (16, 256)
"""Least and most requests whose intent is synced before there is a slot, so that slots never wait for the disk."""
RECONCILE_S = 45.0
"""Between two comparisons with the account; its figure lags, so more often says nothing more."""
WORTH_WAITING_SHARE = Decimal("0.2")
"""Of the budget; when doubt holds less, the run pauses at once and settles it at its next start."""
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
        self._plan_of = plan_of
        self.history = history
        self.ledger = ledger
        self._watch = watch
        self.retries = RetryBudget()
        self._tokens = TokenBudget(token_caps or {}, history)
        # A server of one's own queues what it cannot serve at once; services with many providers refuse.
        start = START_LIMIT if provider.names_providers else settings.in_flight
        self.limiter = ProbeLimiter(settings.in_flight, start)
        self._slots = Slots(self.limiter)
        self._doubts = Doubts(provider, journal, history, ledger)
        self._lost = LostRequests(self._doubts, ledger, self.again)
        cooldown = Cooldown()
        self._attempts = Attempts(
            provider=provider,
            known_providers={endpoint.provider.lower() for endpoint in endpoints},
            journal=journal,
            history=history,
            ledger=ledger,
            settlement=Settlement(provider, journal, history, ledger, self._doubts),
            writer=RequestWriter(provider, journal, history, cooldown, template_options),
            slots=self._slots,
            cooldown=cooldown,
            retries=self.retries,
            lost=self._lost,
            watch=watch,
            settings=settings,
            queue=self,
        )
        self._longest_run_s = longest_run_s(provider, settings, longest_answer_tokens)
        self._lookahead = max(LOOKAHEAD[0], min(LOOKAHEAD[1], settings.in_flight // 2))
        self._ready = WaitingWork(history.by_dataset, lambda: self.limiter.limit(time.monotonic()))
        self._shards: set[Shard] = set()
        self._active: set[asyncio.Task[None]] = set()
        self._dataset_of = dict(history.doubtful)
        self._changed = asyncio.Event()
        self._halt: Eagle3Error | None = None
        self._halted = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []

    # for the session

    async def start(self) -> None:
        """Compare with the account, then begin to send."""
        await self._doubts.reconcile(is_quiet=self._rested_s > 0, since_s=self._rested_s)
        loops = (
            self._dispatch(),
            self._pump_forever(),
            self._attempts.note_forever(),
            self._lost.look_forever(),
            self._reconcile_forever(),
        )
        self._loops = [asyncio.create_task(self._until_halted(loop)) for loop in loops]

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
            self._attempts.recall(Work(prompt, plan, shard, rank, bound, history=sample))
        if shard.remaining:
            self._shards.add(shard)
            await shard.done

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
        await self._doubts.look_all_up(self._dataset_of)
        await self._doubts.reconcile(is_quiet=self._rested_s > 0 and not self._active, since_s=0.0)

    @property
    def _rested_s(self) -> float:
        """Seconds since the last moment at which a request of this run can have been under way at the provider."""
        return time.time() - self.history.last_time_s - self._longest_run_s

    @property
    def error(self) -> Eagle3Error | None:
        """Why sending stopped; None while it goes on."""
        return self._halt

    @property
    def num_lost(self) -> int:
        """Requests of unknown fate that are waited for."""
        return len(self._lost)

    # for attempts

    def again(self, work: Work, delay_s: float) -> None:
        """Ask a sample, now or after a while."""
        if delay_s <= 0:
            self._ready.push(work)
            self._changed.set()
            return
        asyncio.get_running_loop().call_later(delay_s, self.again, work, 0.0)

    def ended(self, work: Work) -> None:
        """Note that a sample is final."""
        work.body = None
        work.shard.remaining -= 1
        if not work.shard.remaining:
            self._shards.discard(work.shard)
            if not work.shard.done.done():
                work.shard.done.set_result(None)

    def changed(self) -> None:
        """Look again at what may be sent: something that held requests back has changed."""
        self._changed.set()

    def halt(self, error: Eagle3Error) -> None:
        """Send nothing more; shards fail with `error` when what is under way has ended."""
        if self._halt is not None:
            return
        self._halt = error
        self._halted.set()
        self._attempts.stop()
        self._slots.close()
        self._changed.set()

    # who is next

    async def _dispatch(self) -> None:
        while True:
            await self._until_ready()
            work = self._ready.pop()
            if self._is_wanted(work) and await self._is_carried(work):
                number = work.history.last_number = work.history.last_number + 1
                self._attempts.num_preparing += 1
                self._tokens.begun(work.plan.dataset)
                task = asyncio.create_task(self._attempts.run(work, number))
                self._active.add(task)
                task.add_done_callback(lambda task, dataset=work.plan.dataset: self._attempt_ended(task, dataset))

    async def _until_ready(self) -> None:
        while not self._ready or self._attempts.num_preparing >= self._most_preparing or self._halt is not None:
            await self._next_change()

    @property
    def _most_preparing(self) -> int:
        """Requests for the free slots, and some for those that are freed while intents are synced."""
        return self._lookahead + max(0, int(self.limiter.limit(time.monotonic())) - self.limiter.in_flight)

    def _is_wanted(self, work: Work) -> bool:
        """Return whether a sample is to be asked for now; one that is not was parked or given up."""
        admission = self._tokens.admission(work)
        if admission is Admission.WAIT:
            self._tokens.park(work)
        elif admission is Admission.OVER:
            for unwanted in [work, *self._tokens.give_up(work.plan.dataset)]:
                self.ended(unwanted)
        return admission is Admission.GO

    async def _is_carried(self, work: Work) -> bool:
        """Reserve the money for a request, waiting for it if need be; False when sending has to stop."""
        amount_usd = work.worst_usd
        key = (work.prompt.sample_id, work.history.last_number + 1)
        while self._watch is not None and not self._watch.admits(self.ledger.reserved_usd, amount_usd):
            await self._next_change()
            if self._halt is not None:
                return False
        while not self.ledger.reserve(key, amount_usd):
            if self._active:
                await self._next_change()
            else:
                await self._settle_doubts(amount_usd)
                if self._halt is None and amount_usd > self.ledger.available_usd:
                    self.halt(budget_reached(self.ledger, amount_usd))
            if self._halt is not None:
                return False
        return True

    async def _settle_doubts(self, amount_usd: Decimal) -> None:
        """Find out what requests in doubt cost; wait for the account when they hold much of the budget."""
        held_usd = self.ledger.held_usd
        quiet_s = max(0.0, -self._rested_s)
        is_worth_waiting = held_usd >= max(amount_usd, WORTH_WAITING_SHARE * self.ledger.budget_usd)
        await self._doubts.settle(self._dataset_of, self._halted, quiet_after_s=quiet_s, can_wait=is_worth_waiting)

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _attempt_ended(self, task: asyncio.Task[None], dataset: str) -> None:
        self._active.discard(task)
        for parked in self._tokens.ended(dataset):
            self.again(parked, 0.0)
        self._changed.set()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.halt(_as_ours(error))
        self._fail_shards_when_idle()

    # in the background

    async def _until_halted(self, loop: Awaitable[None]) -> None:
        """Run a loop; what it raises ends the sending."""
        try:
            await loop
        except Exception as exc:  # noqa: BLE001 - a loop that dies in silence would let everybody wait for ever
            self.halt(_as_ours(exc))

    async def _pump_forever(self) -> None:
        while True:
            await asyncio.sleep(PUMP_S)
            self._slots.pump()
            self._fail_shards_when_idle()

    async def _reconcile_forever(self) -> None:
        """Compare with the account now and then; it can only raise what we think is spent."""
        while True:
            await asyncio.sleep(RECONCILE_S)
            await self._doubts.reconcile(is_quiet=False, since_s=0.0)

    def _fail_shards_when_idle(self) -> None:
        if not self._active and not isinstance(self._halt, StoppedError):  # a stop drains
            self._fail_shards()

    def _fail_shards(self) -> None:
        if self._halt is None:
            return
        for shard in self._shards:
            if not shard.done.done():
                shard.done.set_exception(again(self._halt))
        self._shards.clear()


def _as_ours(error: BaseException) -> Eagle3Error:
    """Return an error that ends the sending."""
    if isinstance(error, Eagle3Error):
        return error
    failure = Eagle3Error(f"generation stopped on an unexpected {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
