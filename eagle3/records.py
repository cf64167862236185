"""What flows between stages: frozen records, standard library only.

Records carry everything a later stage decides on, so that nothing is ever asked twice of a paid API. They are
written by the schemas of `eagle3.formats`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias, cast

JsonObject: TypeAlias = dict[str, Any]


def canonical_json(value: object) -> str:
    """Serialise `value` so that equal values give equal text: sorted keys, no spaces, no ASCII escapes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def strings_of(value: object) -> Iterator[str]:
    """Yield every string inside a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[str, object]", value).items():
            yield key
            yield from strings_of(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("list[object]", value):
            yield from strings_of(item)


def sha256_text(text: str) -> str:
    """Return the hex sha256 of UTF-8 text."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """One conversation that the target model is asked to continue."""

    sample_id: str
    """Identity of the sample through the whole run; see `sample_id_of`."""
    dataset: str
    prompt_id: str
    """The author's own name for the prompt, for people; not unique across datasets."""
    messages: Sequence[JsonObject]
    """OpenAI chat messages, unchanged."""
    tools: Sequence[JsonObject] = ()
    """OpenAI tool declarations, unchanged; empty when none were declared."""
    replica: int = 0
    """Which of several answers to the same prompt this is."""


def sample_id_of(dataset: str, messages: Sequence[JsonObject], tools: Sequence[JsonObject], replica: int) -> str:
    """Return the sample id: 32 hex digits of the sha256 over dataset, canonical messages, tools and replica."""
    return sha256_text(canonical_json([dataset, list(messages), list(tools), replica]))[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call, spelled as the model spelled it."""

    id: str
    name: str
    arguments: str
    """Raw argument text; never parsed and dumped again."""


IMPORTED_PROVIDER = "imported"
"""Provider name of answers that were brought along instead of asked for."""


class Usage(NamedTuple):
    """Token counts as billed, in the target's own tokenizer. A tuple, as `Answer` is: one is made for each reply."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer, with everything later stages may need."""

    sample_id: str
    dataset: str
    reasoning: str | None
    """Text before the close of thinking, untouched; None when the reply had none."""
    content: str | None
    """Answer text, untouched (never stripped); None when the reply had none."""
    tool_calls: Sequence[ToolCall]
    finish_reason: str
    native_finish_reason: str | None
    provider: str
    """Name of the provider that answered; the server's host name for local servers."""
    model: str
    """Model id as named in the reply."""
    quantization: str | None
    """As listed for the endpoint in the snapshot taken at the start; None when not declared."""
    generation_id: str | None
    usage: Usage
    cost_usd: Decimal
    """What the account paid for this answer."""
    cost_is_estimated: bool
    """True when the reply carried no cost and it was computed from the dearest eligible price."""
    prompt_token_ids: Sequence[int] | None
    """Native prompt ids when the server gave them."""
    completion_token_ids: Sequence[int] | None
    """Native completion ids, end id included, when the server gave them."""
    latency_s: float
    attempts: int
    """Requests sent for this sample, this one included; refusals by rate limit are not counted."""
    from_cache: bool
    """True when the reply came out of the provider's response cache, free of charge."""
    raw_body: bytes
    """The reply exactly as received."""
    token_bytes: Sequence[bytes] | None = None
    """Bytes of every answered token when the reply has logprobs; not stored, read again from the raw body."""


class FailureClass(StrEnum):
    """Why a sample has no answer."""

    RETRIES_EXHAUSTED = "retries_exhausted"
    AMBIGUOUS = "ambiguous"
    REJECTED = "rejected"
    EMPTY = "empty"
    MALFORMED = "malformed"
    PROMPT_QUARANTINED = "prompt_quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCompletion:
    """A sample that ended without an answer: a counted result, not a log line."""

    sample_id: str
    dataset: str
    failure: FailureClass
    message: str
    attempts: int


class SegmentKind(StrEnum):
    """What a stretch of token ids is."""

    PROMPT = "prompt"
    REASONING = "reasoning"
    CONTENT = "content"
    TOOL = "tool"
    """Text inside a tool section: call ids and arguments."""
    CONTROL = "control"
    """Ids that the model generated and that are no text: close of thinking, tool markers, end."""
    AMBIGUOUS = "ambiguous"
    """Completion ids of which several spellings fit the evidence; masked from the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A half-open stretch [start, stop) of `input_ids`. Segments of a sample tile [0, T)."""

    kind: SegmentKind
    start: int
    stop: int


class Exactness(StrEnum):
    """How surely `input_ids` are what the model produced, best first."""

    EXACT_IDS = "exact_ids"
    EXACT_LOGPROBS = "exact_logprobs"
    COUNT_VERIFIED = "count_verified"
    COUNT_REPAIRED = "count_repaired"
    COUNT_AMBIGUOUS = "count_ambiguous"
    UNVERIFIED = "unverified"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSample:
    """Prompt and completion as token ids of the target."""

    sample_id: str
    dataset: str
    input_ids: Sequence[int]
    """int32 ids, length T = prompt + completion."""
    num_prompt_tokens: int
    segments: Sequence[Segment]
    exactness: Exactness
    delta: int | None
    """Rebuilt minus billed completion tokens under the provider's profile; None when nothing was billed."""
    provider: str
    model: str
    finish_reason: str


def loss_mask(sample: TokenSample) -> list[bool]:
    """Return which ids carry loss, length T: everything the model generated and that is not ambiguous."""
    masked = {SegmentKind.PROMPT, SegmentKind.AMBIGUOUS}
    mask: list[bool] = []
    for segment in sample.segments:
        mask.extend([segment.kind not in masked] * (segment.stop - segment.start))
    return mask


class Severity(StrEnum):
    """How bad a finding is; `critical` stops the run, `error` drops the sample."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """One observation of one rule."""

    rule: str
    severity: Severity
    sample_id: str | None
    """None for findings about a provider or the whole run."""
    detail: str
    provider: str | None = None
    position: int | None = None
    """Index into `input_ids` where it shows, when it has one place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What the audit saw and decided."""

    num_samples: int
    num_kept: int
    verdict: str
    """`passed` or `failed`."""
    counts: Mapping[str, Mapping[str, int]]
    """Findings per rule and severity."""
    counts_by_provider: Mapping[str, Mapping[str, int]]
    """Findings per provider and rule."""
    exactness: Mapping[str, int]
    delta_by_provider: Mapping[str, Mapping[str, int]]
    """Per provider: how many samples had which rebuilt-minus-billed difference (as text)."""
    findings: Sequence[AuditFinding]
    dropped: Mapping[str, str]
    """sample_id -> rule that dropped it."""
