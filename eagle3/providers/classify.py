"""What a request's end means: for the sample, for the run, and for the money. A table, read from the top.

Each row names one shape that services really send. The first row that fits decides; the last row of each status range
fits everything in it. `Billing` is conservative: only what is known to be free releases a reservation.

Source: OpenRouter's error documentation and its openapi file; issue threads of clients that met the shapes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from eagle3.providers.base import RawReply, TransportFailure
from eagle3.providers.wire import ErrorBody, ParsedReply, ReplyKind, parse_reply


class Verdict(StrEnum):
    """What to do next."""

    ANSWERED = "answered"
    RATE_LIMITED = "rate_limited"
    """Wait and ask again; not an attempt."""
    RETRY = "retry"
    AMBIGUOUS = "ambiguous"
    """The answer may exist and be billed: settle that first, then ask again with the same bytes."""
    BAD_ANSWER = "bad_answer"
    """An answer that is none; asking again a few times may help."""
    SAMPLE_REJECTED = "sample_rejected"
    RUN_REJECTED = "run_rejected"
    CREDENTIALS = "credentials"
    OUT_OF_CREDITS = "out_of_credits"


class Billing(StrEnum):
    """What is known about the money."""

    FREE = "free"
    REPORTED = "reported"
    """The reply carries usage: charge that."""
    UNKNOWN = "unknown"
    """Keep the reservation until the service says what it charged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row: all conditions that are given must hold."""

    name: str
    verdict: Verdict
    billing: Billing
    codes: range | frozenset[int]
    text: re.Pattern[str] | None = None
    """Searched in message, error type and the provider's own words."""
    is_moderation: bool = False
    """Only errors that carry moderation details."""
    availability: frozenset[str] | None = None
    is_retryable: bool = False
    """Only errors that the service itself marks as retryable."""

    def fits(self, code: int, error: ErrorBody) -> bool:
        """Return whether this row speaks about the given error."""
        if code not in self.codes:
            return False
        if self.is_moderation and not error.is_moderation:
            return False
        if self.is_retryable and not error.is_retryable:
            return False
        if self.availability is not None and error.availability not in self.availability:
            return False
        words = " ".join(part for part in (error.message, error.error_type, error.raw) if part)
        return self.text is None or self.text.search(words) is not None


def _codes(*codes: int) -> frozenset[int]:
    return frozenset(codes)


_BUDGET = re.compile(
    r"(key|workspace|monthly|weekly|daily|spend\w*|credit)\W+(\w+\W+){0,3}?limit|"
    r"limit exceeded|budget|insufficient credit",
    re.IGNORECASE,
)
_MODERATION = re.compile(r"moderat|flagged|guardrail|content.?policy|safety", re.IGNORECASE)
_NO_MODEL = re.compile(
    r"not a valid model|model_not_found|wrong_endpoint|no such model|model .* does not exist", re.IGNORECASE
)

_PROMPT_LIMIT = re.compile(r"prompt tokens limit exceeded", re.IGNORECASE)

RULES: Sequence[Rule] = (
    Rule(
        name="prompt beyond what the key may send",
        verdict=Verdict.SAMPLE_REJECTED,
        billing=Billing.FREE,
        codes=_codes(402),
        text=_PROMPT_LIMIT,
    ),
    Rule(name="no money", verdict=Verdict.OUT_OF_CREDITS, billing=Billing.FREE, codes=_codes(402)),
    Rule(name="key refused", verdict=Verdict.CREDENTIALS, billing=Billing.FREE, codes=_codes(401)),
    Rule(
        name="moderated",
        verdict=Verdict.SAMPLE_REJECTED,
        billing=Billing.FREE,
        codes=_codes(403),
        is_moderation=True,
    ),
    Rule(name="budget used up", verdict=Verdict.OUT_OF_CREDITS, billing=Billing.FREE, codes=_codes(403), text=_BUDGET),
    Rule(
        name="moderated, in words",
        verdict=Verdict.SAMPLE_REJECTED,
        billing=Billing.FREE,
        codes=_codes(403),
        text=_MODERATION,
    ),
    Rule(name="forbidden", verdict=Verdict.RUN_REJECTED, billing=Billing.FREE, codes=_codes(403)),
    Rule(
        name="capacity",
        verdict=Verdict.RATE_LIMITED,
        billing=Billing.FREE,
        codes=range(400, 600),
        availability=frozenset({"capacity_exhausted"}),
    ),
    Rule(name="rate limit", verdict=Verdict.RATE_LIMITED, billing=Billing.FREE, codes=_codes(429)),
    Rule(
        name="available again soon",
        verdict=Verdict.RETRY,
        billing=Billing.FREE,
        codes=range(400, 500),
        is_retryable=True,
    ),
    Rule(name="nobody serves it", verdict=Verdict.RUN_REJECTED, billing=Billing.FREE, codes=_codes(404)),
    Rule(
        name="model unknown",
        verdict=Verdict.RUN_REJECTED,
        billing=Billing.FREE,
        codes=_codes(400),
        availability=frozenset({"model_not_found", "wrong_endpoint"}),
    ),
    Rule(
        name="model unknown, in words",
        verdict=Verdict.RUN_REJECTED,
        billing=Billing.FREE,
        codes=_codes(400),
        text=_NO_MODEL,
    ),
    Rule(name="too early or too slow", verdict=Verdict.RETRY, billing=Billing.FREE, codes=_codes(408, 425)),
    Rule(name="bad request", verdict=Verdict.SAMPLE_REJECTED, billing=Billing.FREE, codes=range(400, 500)),
    Rule(name="overloaded", verdict=Verdict.RETRY, billing=Billing.FREE, codes=_codes(503, 529)),
    Rule(name="broken behind the door", verdict=Verdict.RETRY, billing=Billing.UNKNOWN, codes=range(500, 600)),
    Rule(name="not this API", verdict=Verdict.RUN_REJECTED, billing=Billing.FREE, codes=range(300, 400)),
)
"""Rows for errors, by HTTP status or by `error.code` inside HTTP 200."""

_TRANSPORT: Mapping[TransportFailure, tuple[Verdict, Billing]] = {
    TransportFailure.NOT_SENT: (Verdict.RETRY, Billing.FREE),
    TransportFailure.CUT: (Verdict.AMBIGUOUS, Billing.UNKNOWN),
    TransportFailure.STALLED: (Verdict.AMBIGUOUS, Billing.UNKNOWN),
    TransportFailure.DEADLINE: (Verdict.AMBIGUOUS, Billing.UNKNOWN),
}


class Outcome(NamedTuple):
    """A reply, read and judged."""

    verdict: Verdict
    billing: Billing
    rule: str
    """Row or shape that decided, for people."""
    message: str
    parsed: ParsedReply | None
    code: int | None
    """HTTP status or the error's own code; None when nothing arrived."""
    provider: str | None
    retry_after_s: float | None
    generation_id: str | None


_SHAPES: Mapping[ReplyKind, tuple[Verdict, Billing | None]] = {
    ReplyKind.ANSWER: (Verdict.ANSWERED, None),
    # A finish reason of `error` is insured, but partial text was made: what the reply reports is charged.
    ReplyKind.CHOICE_ERROR: (Verdict.RETRY, None),
    ReplyKind.PADDING_ONLY: (Verdict.AMBIGUOUS, Billing.UNKNOWN),
    ReplyKind.MALFORMED: (Verdict.AMBIGUOUS, Billing.UNKNOWN),
    ReplyKind.PARTIAL_REASONING: (Verdict.SAMPLE_REJECTED, None),
    ReplyKind.UNFINISHED: (Verdict.BAD_ANSWER, None),
    ReplyKind.EMPTY: (Verdict.BAD_ANSWER, None),
}
"""What a body without a top-level error means; None: what it reports is charged."""


def classify(reply: RawReply) -> Outcome:
    """Say what one reply means."""
    if reply.failure is not None:
        verdict, billing = _TRANSPORT[reply.failure]
        return _outcome(reply, None, verdict, billing, reply.failure.value, reply.message)
    parsed = parse_reply(reply.body)
    kind, answer, status = parsed.kind, parsed.answer, reply.status or 0
    if kind is ReplyKind.ANSWER and status < 300 and answer is not None and answer.usage is not None:
        # Nearly every reply: said at once, which saves a tenth of this function.
        return Outcome(
            Verdict.ANSWERED,
            Billing.REPORTED,
            ReplyKind.ANSWER,
            parsed.detail,
            parsed,
            reply.status,
            answer.provider or None,
            reply.retry_after_s,
            answer.generation_id or reply.generation_id,
        )
    if status >= 300:
        error = parsed.error or ErrorBody(code=status, message=f"HTTP {status} with a body that is no JSON error")
        return _by_rule(reply, parsed, status, error)
    if kind is ReplyKind.ERROR:
        error = parsed.error
        assert error is not None
        code = error.code if error.code and 300 <= error.code < 600 else 500
        return _by_rule(reply, parsed, code, error, is_inside_200=True)
    verdict, billing = _SHAPES[kind]
    if kind is ReplyKind.UNFINISHED and answer is not None and answer.finish_reason == "content_filter":
        verdict = Verdict.SAMPLE_REJECTED
    message = parsed.detail
    if kind is ReplyKind.CHOICE_ERROR:
        message = (parsed.error.message if parsed.error is not None else "") or "the choice ended with an error"
    return _outcome(reply, parsed, verdict, billing or _reported(parsed), kind.value, message)


def _by_rule(
    reply: RawReply, parsed: ParsedReply, code: int, error: ErrorBody, *, is_inside_200: bool = False
) -> Outcome:
    rule = next((row for row in RULES if row.fits(code, error)), None)
    verdict = rule.verdict if rule is not None else Verdict.RUN_REJECTED
    billing = rule.billing if rule is not None else Billing.UNKNOWN
    if is_inside_200 and _reported(parsed) is Billing.REPORTED:
        billing = Billing.REPORTED
    words = error.message or (error.raw or "")
    message = f"HTTP {reply.status}, code {code}: {words}" if is_inside_200 else f"HTTP {code}: {words}"
    return _outcome(reply, parsed, verdict, billing, rule.name if rule is not None else "unknown", message, code)


def _reported(parsed: ParsedReply) -> Billing:
    has_usage = parsed.answer is not None and parsed.answer.usage is not None
    return Billing.REPORTED if has_usage else Billing.UNKNOWN


def _outcome(
    reply: RawReply,
    parsed: ParsedReply | None,
    verdict: Verdict,
    billing: Billing,
    rule: str,
    message: str,
    code: int | None = None,
) -> Outcome:
    provider = generation_id = None
    retry_after_s = reply.retry_after_s
    if parsed is not None and parsed.answer is not None:
        provider, generation_id = parsed.answer.provider or None, parsed.answer.generation_id
    if parsed is not None and parsed.error is not None:
        provider = provider or parsed.error.provider
        waits = [hint for hint in (retry_after_s, parsed.error.retry_after_s) if hint is not None]
        retry_after_s = max(waits, default=None)
    return Outcome(
        verdict=verdict,
        billing=billing,
        rule=rule,
        message=message,
        parsed=parsed,
        code=code if code is not None else reply.status,
        provider=provider,
        retry_after_s=retry_after_s,
        generation_id=generation_id or reply.generation_id,
    )
