"""A generation session: its own thread, its own event loop, one engine for all shards.

    with open_session(recipe, run, target) as session:
        shards = [session.generate_shard(shard) for shard in prompt_shards(...)]     # or concurrently, or from tasks
    manifest = seal_completions(session)

`stage.generate` does all of that. The caller holds the run directory's lock.
"""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import uvloop

from eagle3.artifacts import OpenStage, RunDirectory, ShardRef, Stage
from eagle3.errors import Eagle3Error, StoppedError
from eagle3.generation.asking import Asker, Question
from eagle3.generation.collector import rare_collections
from eagle3.generation.cost import keep_plan
from eagle3.generation.engine import Engine
from eagle3.generation.figures import book_figures
from eagle3.generation.history import History, replay
from eagle3.generation.journal import Journal
from eagle3.generation.journal_lines import Place
from eagle3.generation.ledger import Ledger
from eagle3.generation.reporting import progress_events
from eagle3.generation.requests import Plan
from eagle3.generation.selection import quantizations_of, select_endpoints
from eagle3.generation.shards import (
    ENDPOINTS_NAME,
    STATE_NAME,
    completion_from_entry,
    finished_shard,
    open_completions,
    prompt_shards,
    read_prompts,
    write_shard,
)
from eagle3.generation.snapshots import keep_snapshot
from eagle3.generation.watching import AnswerWatch, Check
from eagle3.progress import Progress, no_progress
from eagle3.providers.base import ChatRequest, Endpoint
from eagle3.providers.connection import raise_descriptor_limit
from eagle3.providers.opening import open_provider
from eagle3.recipe import Recipe
from eagle3.records import Completion, JsonObject, PromptRecord

PROGRESS_S = 1.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


class GenerationSession:
    """Buys answers on a thread of its own. Use it as a context manager; methods may be called from any thread."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDirectory,
        target: Path,
        progress: Progress = no_progress,
        check: Check | None = None,
    ) -> None:
        """Prepare; entering the context starts the thread.

        Args:
            recipe: Sections prompts and generation are read.
            run: Its prompts must be sealed, and the caller must hold its lock.
            target: Prepared Hugging Face directory, for a look-alike that has to know the tokenizer.
            progress: Called about once a second, on the session's thread.
            check: Looks at answers while others are bought; its objection ends the session. At most
                `audit.max_at_risk_usd` are then at risk at a time.
        """
        self.recipe = recipe
        self.run = run
        self._target = target
        self._progress = progress
        self._watch = None if check is None else AnswerWatch(check, recipe.audit.max_at_risk_usd, self._read_answer)
        self.stage: OpenStage = open_completions(recipe, run)
        self._prompts = run.sealed(Stage.PROMPTS)
        self._totals, self._offsets = _positions(prompt_shards(self._prompts), recipe)
        self._thread = threading.Thread(target=self._run_thread, name="generation", daemon=True)
        self._ready: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._stop_requested = threading.Event()
        self._engine: Engine | None = None
        self._asker: Asker | None = None
        self._endpoints: Sequence[Endpoint] = ()
        self._quantizations: Mapping[str, str | None] = {}
        self._plans: dict[tuple[str, bool], Plan] = {}
        self._files = ThreadPoolExecutor(1, thread_name_prefix="generation-files")
        """The one thread that reads prompts and writes shards: each thread that does so keeps a heap of its own."""
        self._planned_usd: JsonObject = {}
        self._stopping: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self.written: dict[str, ShardRef] = {}
        """By prompt shard, the answers that this session wrote or found complete."""
        self.history = History()
        self.ledger = Ledger(recipe.generation.budget_usd)

    def __enter__(self) -> Self:
        """Start the thread, replay the journal, list endpoints.

        Raises:
            RunRejectedError: No endpoint may answer.
            CredentialsError: The key is missing or was refused.
        """
        raise_descriptor_limit(self.recipe.generation.in_flight)
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self._thread.join()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close connections and journals, and end the thread."""
        if kind is not None:
            self.stop()
        loop, closing = self._loop, self._closing
        if loop is not None and closing is not None:
            with contextlib.suppress(RuntimeError):  # the loop is gone already
                loop.call_soon_threadsafe(closing.set)
        self._thread.join()
        if self._failure is not None and kind is None:
            raise self._failure

    def generate_shard(self, shard: ShardRef) -> ShardRef:
        """Buy and write the answers to one prompt shard; return at once when they are there.

        Raises:
            PausedError: Money ended, or somebody stopped; everything received is kept.
            ProviderError: No request can work.
        """
        return self._submit(self._generate_shard(shard)).result()

    async def agenerate_shard(self, shard: ShardRef) -> ShardRef:
        """As `generate_shard`, awaited on the caller's own loop."""
        return await asyncio.wrap_future(self._submit(self._generate_shard(shard)))

    @property
    def eligible(self) -> Sequence[Endpoint]:
        """Every endpoint that may answer for some dataset, each once."""
        found = {endpoint.tag: endpoint for plan in self._plans.values() for endpoint in plan.selection.eligible}
        return tuple(found.values())

    def ask(self, name: str, request: ChatRequest, endpoint: Endpoint, extra: JsonObject) -> Completion:
        """Ask one endpoint one question that belongs to no dataset; it is paid from the same budget.

        Args:
            name: Names its journal entries.
            request: What to ask.
            endpoint: Who must answer.
            extra: Further fields of the request.

        Raises:
            PausedError: Money ended; nothing was sent.
            ProviderError: There is no usable answer; what it cost is booked.
        """
        question = Question(name=name, request=request, endpoint=endpoint, extra=extra)
        return self._submit(self._ask(question)).result()

    def generate_all(self) -> list[ShardRef]:
        """Buy all shards at once, so that the slots stay full to the end.

        Raises:
            Eagle3Error: As for `generate_shard`; raised when nothing is under way any more.
        """
        futures = [self._submit(self._generate_shard(shard)) for shard in prompt_shards(self._prompts)]
        errors: list[BaseException] = []
        shards: list[ShardRef] = []
        for future in futures:
            try:
                shards.append(future.result())
            except Eagle3Error as exc:
                errors.append(exc)
        if errors:
            raise errors[0]
        return shards

    def stop(self) -> None:
        """Send nothing more, wait a little for answers already paid for, then let every caller fail with StoppedError.

        Safe in a signal handler; calling it again does nothing.
        """
        if self._stop_requested.is_set():
            return
        self._stop_requested.set()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._begin_stop)

    def stats(self) -> JsonObject:
        """Return the figures of the stage so far, as the manifest keeps them."""
        engine = self._engine
        return {
            **book_figures(self.history, self.ledger, self._totals),
            "planned_usd": self._planned_usd,
            "peak_in_flight": engine.limiter.peak if engine is not None else 0,
            "rate_limited": engine.limiter.num_refused if engine is not None else 0,
            "slowed_retries": engine.retries.num_slowed if engine is not None else 0,
            **({"watch": self._watch.to_json()} if self._watch is not None else {}),
        }

    @property
    def num_samples(self) -> int:
        """Samples that the stage asks for."""
        return sum(self._totals.values())

    # on the session's thread

    def _run_thread(self) -> None:
        try:
            with rare_collections(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as exc:  # noqa: BLE001 - handed to the caller's thread
            if not self._ready.done():
                self._ready.set_exception(exc)
            else:
                self._failure = exc
        finally:
            self._files.shutdown()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        generation = self.recipe.generation
        self.history, self.ledger = await self._on_files(
            replay, self.stage.path, list(self._totals), generation.budget_usd
        )
        if self._too_many_failed():
            self.history.reopen_failures()
        self.stage.path.mkdir(parents=True, exist_ok=True)
        async with open_provider(self.recipe, self.stage.file(STATE_NAME), self._target) as provider:
            endpoints = await provider.list_endpoints()
            self._endpoints = endpoints
            for dataset in self.recipe.prompts.datasets:
                self._plan(dataset.name, needs_tools=False)
            known = keep_snapshot(self.stage.file(ENDPOINTS_NAME), endpoints)
            self._quantizations = quantizations_of(self.recipe, known)
            self._planned_usd = await self._on_files(keep_plan, self.recipe, self.run, endpoints)
            journal = Journal(self.stage.path)
            self._engine = engine = Engine(
                provider=provider,
                endpoints=known,
                plan_of=self._plan_of,
                journal=journal,
                history=self.history,
                ledger=self.ledger,
                settings=generation,
                template_options=self.recipe.target.template_options,
                longest_answer_tokens=max(dataset.sampling.max_tokens for dataset in self.recipe.prompts.datasets),
                watch=self._watch,
                token_caps={
                    dataset.name: dataset.max_completion_tokens
                    for dataset in self.recipe.prompts.datasets
                    if dataset.max_completion_tokens is not None
                },
            )
            try:
                await engine.start()
                self._asker = Asker(provider, journal, self.history, self.ledger, generation)
                if self._stop_requested.is_set():
                    self._begin_stop()
                self._ready.set_result(None)
                helpers = [asyncio.create_task(self._report_forever())]
                if self._watch is not None:
                    helpers.append(asyncio.create_task(self._watch.look_forever(engine.changed, self._object)))
                await self._closing.wait()
                if self._stopping is not None:
                    await self._stopping
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)
                await engine.finish()
                self._report()
            finally:
                await journal.aclose()

    def _object(self, error: Eagle3Error) -> None:
        """Send nothing more because of what a look at the answers found."""
        engine, watch = self._engine, self._watch
        assert engine is not None
        assert watch is not None
        bought = sum(tally.samples for tally in self.history.by_dataset.values())
        money = f"Spent so far: {self.ledger.spent_usd:f} USD for {bought} of {self.num_samples} answers. "
        engine.halt(type(error)(f"{error}\n{money}{watch.risk(self.ledger.reserved_usd)}"))

    def _read_answer(self, prompt: PromptRecord, place: Place) -> Completion:
        return completion_from_entry(prompt.dataset, place.read(), self._quantizations)

    def _begin_stop(self) -> None:
        if self._engine is not None and self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        engine = self._engine
        assert engine is not None
        grace_s = self.recipe.generation.stop_grace_s
        message = (
            f"generation was stopped with {sum(tally.samples for tally in self.history.by_dataset.values())} of "
            f"{self.num_samples} answers. Everything received is kept; run again to continue."
        )
        engine.halt(StoppedError(message))
        await engine.drain(grace_s)

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        loop = self._loop
        if loop is None or not self._thread.is_alive():
            work.close()
            raise StoppedError("the generation session is closed: enter it before asking for shards.")
        return asyncio.run_coroutine_threadsafe(work, loop)

    async def _ask(self, question: Question) -> Completion:
        assert self._asker is not None
        return await self._asker.ask(question)

    async def _generate_shard(self, shard: ShardRef) -> ShardRef:
        engine = self._engine
        assert engine is not None
        prompts, bounds = await self._on_files(read_prompts, self.run, shard)
        done = await self._on_files(finished_shard, self.stage, shard, prompts, self.history)
        if done is not None:
            self.written[shard.path] = done
            return done
        total, offset = self._totals[prompts[0].dataset] if prompts else 1, self._offsets[shard.path]
        if self._watch is not None:
            for prompt in prompts:
                place = self.history.sample(prompt.sample_id).answer
                if place is not None:
                    self._watch.known(prompt, place)
        ranks = [(offset + number) / total for number in range(len(prompts))]
        await engine.buy_shard(prompts, ranks, bounds)
        done = await self._on_files(write_shard, self.stage, shard, prompts, self.history, self._quantizations)
        self.written[shard.path] = done
        return done

    async def _on_files(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await asyncio.get_running_loop().run_in_executor(
            self._files, functools.partial(function, *args, **kwargs)
        )

    def _plan(self, dataset: str, *, needs_tools: bool) -> Plan:
        key = (dataset, needs_tools)
        if key not in self._plans:
            sampling = next(entry.sampling for entry in self.recipe.prompts.datasets if entry.name == dataset)
            selection = select_endpoints(
                self.recipe, self._endpoints, max_tokens=sampling.max_tokens, needs_tools=needs_tools
            )
            self._plans[key] = Plan(dataset=dataset, sampling=sampling, selection=selection, cap=selection.cap)
        return self._plans[key]

    def _plan_of(self, prompt: PromptRecord) -> Plan:
        return self._plan(prompt.dataset, needs_tools=bool(prompt.tools))

    def _too_many_failed(self) -> bool:
        failed = sum(tally.failed for tally in self.history.by_dataset.values())
        return failed > self.recipe.generation.max_failed_share * max(1, self.num_samples)

    # progress

    async def _report_forever(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(PROGRESS_S)

    def _report(self) -> None:
        engine = self._engine
        assert engine is not None
        for event in progress_events(
            self.history,
            self.ledger,
            self._totals,
            in_flight=engine.limiter.in_flight,
            num_refused=engine.limiter.num_refused,
        ):
            self._progress(event)


def open_session(
    recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress, check: Check | None = None
) -> GenerationSession:
    """Return a session to be entered with `with`; see `GenerationSession`."""
    return GenerationSession(recipe, run, target, progress, check)


def _positions(shards: Sequence[ShardRef], recipe: Recipe) -> tuple[dict[str, int], dict[str, int]]:
    """Return samples per dataset, and for each shard how many samples of its dataset come before it."""
    totals = {dataset.name: 0 for dataset in recipe.prompts.datasets}
    offsets: dict[str, int] = {}
    for shard in shards:
        dataset = Path(shard.path).parent.name
        offsets[shard.path] = totals[dataset]
        totals[dataset] += shard.num_samples
    return totals, offsets
