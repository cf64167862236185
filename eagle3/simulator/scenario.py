"""The scenario file: which models and providers exist, what they cost, how they fail, and what the account holds.

Everything that varies between two simulated days is here; everything that does not is in the code. A scenario is
immutable once loaded, and every random choice derives from its `seed` and the request, never from the order of arrival.
"""

import hashlib
import itertools
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3.errors import ConfigurationError

Usd = Annotated[Decimal, Field(ge=0)]
TokenCount = Annotated[int, Field(gt=0)]

DEFAULT_PARAMETERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "seed",
    "reasoning",
    "include_reasoning",
    "tools",
    "tool_choice",
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class FaultKind(StrEnum):
    """What can go wrong with one request. The HTTP status of `http_*` kinds is in their name."""

    HTTP_429 = "http_429"
    HTTP_500 = "http_500"
    HTTP_502 = "http_502"
    HTTP_503 = "http_503"
    HTTP_504 = "http_504"
    HTTP_524 = "http_524"
    """The edge gives up: an HTML page, not JSON."""
    HTTP_529 = "http_529"
    ERROR_IN_200 = "error_in_200"
    """HTTP 200 whose body has a top-level `error` and no `choices`; in a stream, a chunk with `error`."""
    CHOICE_ERROR = "choice_error"
    """HTTP 200 with partial text, `finish_reason` "error" and `choices[0].error`."""
    CUT_BODY = "cut_body"
    """The connection closes in the middle of the JSON body."""
    PADDING_ONLY = "padding_only"
    """A body of keep-alive whitespace that ends properly and holds nothing."""
    DROPPED = "dropped"
    """The connection closes without one byte of reply after the request was read."""
    HANG = "hang"
    """Headers and keep-alive whitespace for ever, never a body."""
    SILENCE = "silence"
    """Never one byte of reply."""
    EMPTY = "empty"
    """A finished completion ("stop") without a token; the prompt is billed."""
    BLANK = "blank"
    """A completion without a token and without a finish reason; insured, so not billed."""
    CONTENT_FILTER = "content_filter"
    """The provider's filter answers instead of the model; not billed."""


DELIVERY_FAULTS = frozenset(
    {FaultKind.CUT_BODY, FaultKind.PADDING_ONLY, FaultKind.DROPPED, FaultKind.HANG, FaultKind.SILENCE}
)
"""The model answered and only the reply was lost."""

CONTENT_FAULTS = frozenset(
    {FaultKind.ERROR_IN_200, FaultKind.CHOICE_ERROR, FaultKind.EMPTY, FaultKind.BLANK, FaultKind.CONTENT_FILTER}
)
"""The reply arrives, but the provider made something else than the model's answer."""


class Fault(_Section):
    """One way to fail, for a share of the prompts."""

    kind: FaultKind
    share: float = Field(ge=0, le=1)
    """Share of the prompts that meet this fault. Which ones is decided by the seed and the prompt alone."""
    first_attempts: int = Field(default=1, ge=1)
    """Only the first so many attempts of such a prompt fail."""
    provider: str | None = None
    """Only when routed to this provider (name or routing slug)."""
    retry_after_s: int | None = Field(default=None, ge=0)
    """Sent as `Retry-After` with 429 and 503; absent when null. Not scaled by `time_scale`."""
    billed: bool | None = None
    """Whether the model answered, and was billed, behind the failed reply. Null: true where only the reply is lost
    (cut_body, padding_only, dropped, hang, silence), false for HTTP errors. The other kinds have fixed rules."""

    @property
    def is_billed(self) -> bool:
        """Whether there is an answer behind the failed reply."""
        return self.kind in DELIVERY_FAULTS if self.billed is None else self.billed

    @model_validator(mode="after")
    def _billing_is_open(self) -> Self:
        if self.billed is not None and self.kind in CONTENT_FAULTS:
            raise ValueError(f"`billed` does not apply to {self.kind.value}")
        return self


class Latency(_Section):
    """Seconds from request to reply: lognormal around the median, plus a part that grows with the answer."""

    median_s: float = Field(default=1.5, ge=0)
    sigma: float = Field(default=0.5, ge=0)
    """Spread of the logarithm; 1.0 is a heavy tail (p99 is ten times the median)."""
    per_token_s: float = Field(default=0.0, ge=0)


class CapacityStep(_Section):
    """A change of a provider's capacity, for all of its endpoint's requests at once."""

    after_s: float = Field(gt=0)
    """Seconds since the simulator's first chat request, before `time_scale`."""
    max_in_flight: int | None = Field(ge=1)
    """Capacity from then on; null lifts the limit. What is in flight above a lower one is finished."""


class Rate(_Section):
    """A token bucket: requests per second, whatever their length."""

    per_s: float = Field(gt=0)
    """Requests it accepts per second, before `time_scale`; refused ones do not count."""
    burst: int = Field(ge=1)
    """Requests it accepts at once after a quiet time."""


class Change(_Section):
    """What a provider does differently from some answer on. Null leaves a habit as it was."""

    after_answers: int = Field(ge=0)
    """Requests it accepts before the change, counted since the start of the simulator."""
    space_around_control_tokens: bool | None = None
    tool_arguments: Literal["verbatim", "compact", "spaced"] | None = None
    end_token_billed: bool | None = None
    model_suffix: str | None = None
    """Replies name the model `{id}-{model_suffix}` from then on: another model under the same name."""


class Provider(_Section):
    """One endpoint that serves the models of the scenario."""

    name: str = Field(min_length=1)
    """As in the reply's `provider`."""
    tag: str = Field(min_length=1)
    """Routing slug, such as `northwind/bf16`; the part before the slash names all endpoints of the provider."""
    models: tuple[str, ...] | None = None
    """Models it serves; null for all."""
    prompt_usd_per_mtok: Usd
    completion_usd_per_mtok: Usd
    quantization: str | None = None
    """As declared; null shows as `unknown` to the quantization filter."""
    context_length: TokenCount = 8192
    max_completion_tokens: TokenCount | None = None
    supported_parameters: tuple[str, ...] = DEFAULT_PARAMETERS
    status: int = 0
    """0 is healthy; anything else is never routed to."""
    latency: Latency = Latency()
    capacity: int | None = Field(default=None, ge=1)
    """Requests in flight it accepts; more are passed on to another endpoint or refused with 429. Null: any number."""
    capacity_steps: tuple[CapacityStep, ...] = ()
    """How `capacity` changes in the course of time."""
    rate: Rate | None = None
    """Requests per second it accepts; more are passed on or refused as above. Null: any number."""
    refusal_s: float = Field(default=0.0, ge=0)
    """Seconds until such a refusal is sent, before `time_scale`; of several endpoints the slowest counts."""
    space_around_control_tokens: bool = False
    """Text gains one U+0020 on each side that touches a control token, as a slow tokenizer's decode does."""
    tool_arguments: Literal["verbatim", "compact", "spaced"] = "verbatim"
    """How the JSON of tool-call arguments is written again before it is sent."""
    end_token_billed: bool = True
    returns_token_ids: bool = False
    """Whether `return_token_ids: true` in the request is honoured."""
    cancels_streams: bool = True
    """Whether closing a stream stops the billing. A request without `stream` is always billed in full."""
    change: Change | None = None
    """A change of habits in mid-run."""

    @property
    def base_slug(self) -> str:
        """The slug that names all endpoints of this provider."""
        return self.tag.split("/", 1)[0]

    @model_validator(mode="after")
    def _steps_are_in_order(self) -> Self:
        times = [step.after_s for step in self.capacity_steps]
        if any(later <= earlier for earlier, later in itertools.pairwise(times)):
            raise ValueError(f"`capacity_steps` of {self.name!r} must be in rising order of `after_s`, got {times}")
        return self

    def capacity_at(self, scenario_s: float) -> int | None:
        """Requests in flight it accepts so many seconds after the first one; null for any number."""
        capacity = self.capacity
        for step in self.capacity_steps:
            if scenario_s < step.after_s:
                break
            capacity = step.max_in_flight
        return capacity

    def after(self, num_answers: int) -> "Provider":
        """This provider as it is once it has accepted so many requests."""
        if self.change is None or num_answers < self.change.after_answers:
            return self
        new = self.change.model_dump(exclude={"after_answers", "model_suffix"}, exclude_none=True)
        return self.model_copy(update=new)

    def model_suffix(self, num_answers: int) -> str | None:
        """The model suffix its replies show after so many requests; null for the model's own."""
        if self.change is None or num_answers < self.change.after_answers:
            return None
        return self.change.model_suffix

    def is_named(self, slug: str) -> bool:
        """Whether a routing slug of the request means this endpoint (case does not matter)."""
        wanted = slug.lower()
        return wanted in (self.tag.lower(), self.base_slug.lower(), self.name.lower())


class Model(_Section):
    """One model of the catalogue."""

    id: str = Field(pattern=r"^[^/\s]+/[^/\s]+$")
    """As requested: `author/slug`."""
    suffix: str = Field(min_length=1)
    """The reply names the model `{id}-{suffix}`, its permanent slug."""
    name: str | None = None
    context_length: TokenCount = 8192
    default_max_tokens: TokenCount = 4096
    """What the affordability check assumes when a request has no `max_tokens`."""

    @property
    def permanent_id(self) -> str:
        """The slug in replies."""
        return f"{self.id}-{self.suffix}"


class AccountStart(_Section):
    """The account when the simulator starts without a state file."""

    credits_usd: Usd = Decimal(10)
    key_limit_usd: Usd | None = None
    key: str | None = None
    """The only accepted inference key; null accepts any non-empty one."""
    management_key: str | None = None
    """The key that may read `/credits` and may not do inference; null: nobody may."""


class Scenario(_Section):
    """A whole simulated day."""

    name: str = "unnamed"
    seed: int = 0
    time_scale: float = Field(default=1.0, ge=0)
    """Multiplies every simulated duration; 0 answers at once."""
    padding_interval_s: float = Field(default=0.4, gt=0)
    """Time between two pieces of keep-alive whitespace, before `time_scale`; never more than 19 pieces a reply."""
    generation_lag_s: float = Field(default=2.0, ge=0)
    """`/generation` answers 404 for so long after a reply, before `time_scale`."""
    models: tuple[Model, ...] = Field(min_length=1)
    providers: tuple[Provider, ...] = Field(min_length=1)
    faults: tuple[Fault, ...] = ()
    account: AccountStart = AccountStart()

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        for what, names in (
            ("model", [model.id for model in self.models]),
            ("provider tag", [provider.tag for provider in self.providers]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]!r} is listed twice")
        known = {model.id for model in self.models}
        for provider in self.providers:
            for model_id in provider.models or ():
                if model_id not in known:
                    raise ValueError(f"provider {provider.name!r} serves {model_id!r}, which is not among `models`")
        for fault in self.faults:
            if fault.provider is not None and not any(p.is_named(fault.provider) for p in self.providers):
                raise ValueError(f"fault {fault.kind} names provider {fault.provider!r}, which does not exist")
        return self

    def model(self, model_id: str) -> Model | None:
        """The model requested by its id or permanent slug, or None."""
        return next((model for model in self.models if model_id in (model.id, model.permanent_id)), None)

    def endpoints(self, model: Model) -> tuple[Provider, ...]:
        """The providers that serve `model`, in file order."""
        return tuple(p for p in self.providers if p.models is None or model.id in p.models)


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file.

    Raises:
        ConfigurationError: The file is missing, is not YAML, or does not fit the model; all faults are listed.
    """
    try:
        document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigurationError(f"scenario {str(path)!r} cannot be read: {exc.strerror}. Check --scenario.") from exc
    except yaml.YAMLError as exc:
        raise ConfigurationError(f"scenario {str(path)!r} is not YAML: {exc}") from exc
    try:
        return Scenario.model_validate(document)
    except ValidationError as exc:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in exc.errors()[:5])
        raise ConfigurationError(f"scenario {str(path)!r} has {exc.error_count()} faults: {faults}") from exc


def draw(seed: int, *parts: str | int) -> float:
    """A number in (0, 1) that depends on nothing but the arguments.

    Used for every random choice, so that a run repeats whatever the order in which its requests arrive.
    """
    text = "\x1f".join((str(seed), *map(str, parts)))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest[:6], "big") + 0.5) / 2**48
