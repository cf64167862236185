"""From a prompt to the bytes of its request, the same bytes for every try, even in a later process."""

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from eagle3.generation.cooldown import Cooldown
from eagle3.generation.history import ACCOUNT, History, SampleHistory
from eagle3.generation.journal import Journal
from eagle3.providers.base import ChatProvider, ChatRequest, PriceCap
from eagle3.providers.policy import Selection
from eagle3.recipe import Generation, Sampling
from eagle3.records import JsonObject, PromptRecord, canonical_json, sha256_text

RENEW_S = 5.0
"""Requests sent later than this after their intent are noted again, so that it is known until when they can run."""


def deadline_s(settings: Generation, max_tokens: int) -> float:
    """Return how long a request for so many tokens may take."""
    return settings.max_queue_s + max_tokens / settings.min_tokens_per_s


def longest_run_s(provider: ChatProvider, settings: Generation, max_tokens: int) -> float:
    """Return for how long after its intent a request that we gave up can run at the provider."""
    return deadline_s(settings, max_tokens) + RENEW_S if provider.answers_outlive_us else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """How the samples of one dataset are asked for. Known by identity: there are few, and each is made once."""

    dataset: str
    sampling: Sampling
    selection: Selection
    cap: PriceCap
    """Of the selection."""


@dataclass(slots=True, eq=False)
class Shard:
    """Samples that one caller waits for."""

    remaining: int
    done: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class Work:
    """One sample on its way."""

    prompt: PromptRecord
    plan: Plan
    shard: Shard
    rank: float
    """Among all samples of the run; lower goes first."""
    prompt_token_bound: int
    history: SampleHistory = field(default_factory=SampleHistory)
    body: bytes | None = None
    routing_id: str = ""

    @property
    def worst_usd(self) -> Decimal:
        """The most one request for it can cost."""
        return self.plan.cap.worst_usd(self.prompt_token_bound, self.plan.sampling.max_tokens)


class RequestWriter:
    """Builds bodies. The first one of a sample is frozen: a response cache knows requests by their bytes."""

    def __init__(
        self,
        provider: ChatProvider,
        journal: Journal,
        history: History,
        cooldown: Cooldown,
        template_options: Mapping[str, bool | int | str],
    ) -> None:
        """Write for a provider; `template_options` go to servers that take chat template variables."""
        self._provider = provider
        self._journal = journal
        self._history = history
        self._cooldown = cooldown
        self._template_options = template_options
        self._routings: dict[tuple[Plan, tuple[str, ...]], tuple[str, JsonObject]] = {}
        """Id and object by plan and endpoints to be left out: thousands of requests share one."""

    def restore(self, work: Work) -> None:
        """Give a request that an earlier process sent its own bytes back, if they can be built again."""
        routing_id, digest = work.history.asked_as or ("", "")
        routing = self._history.routings.get(routing_id)
        if routing is None:
            return
        body = self._build(work, routing)
        if hashlib.sha256(body).hexdigest() == digest:
            work.body, work.routing_id = body, routing_id

    async def body(self, work: Work) -> bytes:
        """Return the sample's bytes; new ones leave resting providers out."""
        if work.body is None:
            work.routing_id, routing = self._routing(work.plan)
            if work.routing_id not in self._history.routings:
                entry: JsonObject = {"kind": "routing", "routing": work.routing_id, "object": routing}
                self._history.apply(ACCOUNT, entry)
                await self._journal.append(ACCOUNT, entry)
            work.body = self._build(work, routing)
        return work.body

    def _routing(self, plan: Plan) -> tuple[str, JsonObject]:
        """Return id and routing object of a new request."""
        eligible = plan.selection.eligible
        resting = set(self._cooldown.resting([endpoint.provider for endpoint in eligible], time.monotonic()))
        ignore = tuple(sorted(endpoint.tag for endpoint in eligible if endpoint.provider in resting))
        found = self._routings.get((plan, ignore))
        if found is None:
            routing = self._provider.routing([endpoint.tag for endpoint in eligible], plan.cap, ignore)
            found = self._routings[plan, ignore] = sha256_text(canonical_json(routing))[:12], routing
        return found

    def _build(self, work: Work, routing: JsonObject) -> bytes:
        prompt = work.prompt
        request = ChatRequest(
            messages=prompt.messages,
            tools=prompt.tools,
            sampling=work.plan.sampling,
            replica=prompt.replica,
            template_options=self._template_options,
        )
        return self._provider.build_body(request, routing)
