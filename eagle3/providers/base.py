"""The protocol every provider offers, and the frozen records that cross it.

Network trouble is a value here, not an exception: whether bytes had gone out decides about money, so `complete` returns
a `RawReply` that says how far the request came.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal
from enum import StrEnum
from typing import Protocol, TypeAlias

from eagle3.recipe import Sampling
from eagle3.records import JsonObject

OnAccepted: TypeAlias = Callable[[str], None]
"""Takes the id of a generation that has begun."""

GENERATION_HEADER = "x-generation-id"
"""Names the generation in every reply of OpenRouter's; it comes before the first token is made."""

PICO_USD = Decimal("1e-12")
"""Resolution of all money in a run; that of the Parquet column."""


def money(value: Decimal) -> Decimal:
    """Return an amount of US dollars at the run's resolution, nearest."""
    return value.quantize(PICO_USD, rounding=ROUND_HALF_EVEN)


def money_up(value: Decimal) -> Decimal:
    """Return an amount of US dollars at the run's resolution, never less than `value`."""
    return value.quantize(PICO_USD, rounding=ROUND_CEILING)


class TransportFailure(StrEnum):
    """How far a request came when no complete reply arrived."""

    NOT_SENT = "not_sent"
    """No connection: the server never saw it, so it cannot have been billed."""
    CUT = "cut"
    """The connection broke after bytes had gone out."""
    STALLED = "stalled"
    """No byte for the read timeout."""
    DEADLINE = "deadline"
    """The total deadline passed, perhaps while keep-alive whitespace was still arriving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawReply:
    """What came back for one request, before anybody reads it."""

    status: int | None
    """HTTP status; None when no headers arrived."""
    headers: Mapping[str, str]
    """Lower-case names; empty when none arrived."""
    body: bytes
    elapsed_s: float
    failure: TransportFailure | None = None
    message: str = ""
    """What the transport said; empty without a failure."""

    @property
    def generation_id(self) -> str | None:
        """The provider's id of the answer, known as soon as headers are."""
        return self.headers.get(GENERATION_HEADER)

    @property
    def cache_source_id(self) -> str | None:
        """The generation that was paid for, when this reply came out of the response cache."""
        if self.headers.get("x-openrouter-cache-status", "").upper() != "HIT":
            return None
        return self.headers.get("x-openrouter-cache-source-id")

    @property
    def is_cache_hit(self) -> bool:
        """Whether the reply came out of the response cache, free of charge."""
        return self.headers.get("x-openrouter-cache-status", "").upper() == "HIT"

    @property
    def retry_after_s(self) -> float | None:
        """Seconds the server asks to wait; None when it does not say, or says it in another form."""
        value = self.headers.get("retry-after")
        try:
            return None if value is None else max(0.0, float(value))
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One endpoint that may answer, with its dearest prices in US dollars per token."""

    provider: str
    tag: str
    """Routing slug, such as `moonshotai/int4`."""
    quantization: str | None
    prompt_usd: Decimal
    completion_usd: Decimal
    request_usd: Decimal = Decimal(0)
    context_length: int | None = None
    max_completion_tokens: int | None = None
    supported_parameters: Sequence[str] = ()
    status: int = 0
    uptime_30m: float | None = None
    """Per cent; None when unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceCap:
    """Dearest prices that may be charged: what is reserved, and what the router is told as its limit."""

    prompt_usd: Decimal
    completion_usd: Decimal
    request_usd: Decimal = Decimal(0)

    def worst_usd(self, prompt_tokens: int, max_tokens: int) -> Decimal:
        """Return the most one request can cost."""
        return money_up(prompt_tokens * self.prompt_usd + max_tokens * self.completion_usd + self.request_usd)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What is asked of the target; routing is apart, since it does not change the question."""

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject]
    sampling: Sampling
    replica: int
    """Enters the body, so that a response cache cannot make several answers one."""
    template_options: Mapping[str, bool | int | str] = field(default_factory=dict[str, "bool | int | str"])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """What the account was charged for one generation, as looked up afterwards."""

    generation_id: str
    cost_usd: Decimal
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None
    provider: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountUsage:
    """What the key has spent so far in its life, and what it still may."""

    key_label: str
    """The provider's own masked name of the key; tells keys apart without naming them."""
    usage_usd: Decimal
    remaining_usd: Decimal | None
    """Before the first limit of the key blocks; None without a limit."""


class ChatProvider(Protocol):
    """One service that completes chats. Implementations never retry."""

    @property
    def name(self) -> str:
        """Who answers when replies do not say."""
        ...

    @property
    def usage_lag_s(self) -> float | None:
        """Seconds after which the account's usage figure is believed; None without such a figure."""
        ...

    @property
    def names_providers(self) -> bool:
        """Whether replies say who answered, and endpoints list everybody who may."""
        ...

    @property
    def answers_outlive_us(self) -> bool:
        """Whether a request goes on, is billed and is cached although the client went away."""
        ...

    async def list_endpoints(self) -> Sequence[Endpoint]:
        """Return everything that could answer, unfiltered."""
        ...

    def routing(self, tags: Sequence[str], cap: PriceCap, ignore: Sequence[str]) -> JsonObject:
        """Return the part of the body that chooses endpoints."""
        ...

    def build_body(self, request: ChatRequest, routing: JsonObject) -> bytes:
        """Return the request body; equal arguments give equal bytes."""
        ...

    async def complete(
        self, body: bytes, *, deadline_s: float, refresh: bool = False, on_accepted: OnAccepted | None = None
    ) -> RawReply:
        """Send one request.

        Args:
            body: As built by `build_body`.
            deadline_s: Most seconds until the reply is whole.
            refresh: Ask the response cache to forget its answer first.
            on_accepted: Called as soon as headers name the generation, which may be long before the reply ends.
        """
        ...

    async def find_generation(self, generation_id: str) -> GenerationRecord | None:
        """Return what a generation cost; None while the service does not know it."""
        ...

    async def account(self) -> AccountUsage | None:
        """Return the account's usage; None when the service has no such figure."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...
