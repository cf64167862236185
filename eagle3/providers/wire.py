"""Reading replies leniently: what we use is typed, everything else is ignored, and the raw bytes are kept elsewhere.

Real replies begin with keep-alive whitespace, carry errors inside HTTP 200, omit `cost`, `system_fingerprint` and ids,
and name the model by another slug than was asked for. `parse_reply` tells the outcomes apart that the caller must treat
differently; it never raises.
"""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from eagle3.providers.base import money
from eagle3.providers.bodies import REPLY_BODY, Choice, Message, ReplyBody, ToolCallBody, UsageBody
from eagle3.providers.stream import END, join_stream
from eagle3.records import JsonObject, ToolCall, Usage

FINISH_REASONS = frozenset({"stop", "length", "tool_calls"})
"""Endings that are answers. Any other is quarantined, not counted as success."""

LONGEST_NUMBER = 18
"""Digits of a number that stands in a text."""

_WHOLE_REASONING = frozenset({"reasoning.text"})
_STREAM_STARTS = (b"data:", b":", b"event:")


class _IncompleteError(Exception):
    """A stream that is no whole reply."""


class ReplyKind(StrEnum):
    """What a body turned out to be."""

    ANSWER = "answer"
    ERROR = "error"
    """A top-level `error`, whatever the HTTP status."""
    CHOICE_ERROR = "choice_error"
    """Partial text with an error in the choice."""
    PADDING_ONLY = "padding_only"
    """Nothing but keep-alive whitespace: no response."""
    MALFORMED = "malformed"
    """Not JSON, or JSON of another shape."""
    EMPTY = "empty"
    """A completion without any text or call."""
    UNFINISHED = "unfinished"
    """A finish reason that is none of the known endings."""
    PARTIAL_REASONING = "partial_reasoning"
    """Reasoning was summarised or encrypted, so the model's tokens cannot be known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """An error as told by the service."""

    code: int | None
    message: str
    error_type: str | None = None
    provider: str | None = None
    availability: str | None = None
    """`error.availability.code`, such as `capacity_exhausted`."""
    is_retryable: bool | None = None
    retry_after_s: float | None = None
    is_moderation: bool = False
    raw: str | None = None
    """What the provider behind the service said."""


class Answer(NamedTuple):
    """The parts of a reply that later stages use. A tuple: a frozen dataclass costs as much as reading the body."""

    generation_id: str | None
    model: str | None
    provider: str | None
    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None
    native_finish_reason: str | None
    usage: Usage | None
    cost_usd: Decimal | None
    prompt_token_ids: tuple[int, ...] | None
    completion_token_ids: tuple[int, ...] | None
    token_bytes: tuple[bytes, ...] | None = None
    """Bytes of every answered token, out of `logprobs`; None when there are none or one lacks its bytes."""


class ParsedReply(NamedTuple):
    """One body, read."""

    kind: ReplyKind
    answer: Answer | None = None
    error: ErrorBody | None = None
    detail: str = ""


def parse_reply(body: bytes) -> ParsedReply:  # noqa: PLR0911 - one return per kind of reply
    """Read a chat completion body, streamed or whole, a body of SGLang's `/generate`, or whatever arrived instead."""
    text = body.strip(b" \t\r\n")
    if not text:
        return ParsedReply(kind=ReplyKind.PADDING_ONLY, detail=f"{len(body)} bytes of whitespace and no JSON")
    try:
        reply = _streamed(text) if text.startswith(_STREAM_STARTS) else REPLY_BODY.validator.validate_json(text)
    except _IncompleteError as exc:
        return ParsedReply(kind=ReplyKind.MALFORMED, detail=f"{exc} ({len(body)} bytes)")
    except ValidationError as exc:
        problem = exc.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        return ParsedReply(
            kind=ReplyKind.MALFORMED, detail=f"{place + ': ' if place else ''}{problem['msg']} ({len(body)} bytes)"
        )
    choices, error = reply.get("choices"), reply.get("error")
    if not choices:
        if error is not None:
            return ParsedReply(kind=ReplyKind.ERROR, error=_error_body(error), answer=_billing_only(reply))
        if reply.get("object") == "error":  # the flat form of some OpenAI-compatible servers
            fields = {"message": _text(reply.get("message")), "code": reply.get("code")}
            return ParsedReply(kind=ReplyKind.ERROR, error=_error_body(fields))
        choices = _generated(reply)
        if choices is None:
            return ParsedReply(kind=ReplyKind.MALFORMED, detail="JSON without choices and without an error")
    choice = choices[0]
    answer = _answer(reply, choice)
    failed = choice.get("error")
    if failed is None:
        failed = error
    if failed is not None or answer.finish_reason == "error":
        return ParsedReply(kind=ReplyKind.CHOICE_ERROR, answer=answer, error=_error_body(failed))
    details = choice.get("message", {}).get("reasoning_details")
    if details and any(detail.get("type") not in _WHOLE_REASONING for detail in details):
        return ParsedReply(
            kind=ReplyKind.PARTIAL_REASONING, answer=answer, detail="reasoning is summarised or encrypted"
        )
    if answer.finish_reason not in FINISH_REASONS:
        detail = f"finish reason {answer.finish_reason!r}, expected one of {sorted(FINISH_REASONS)}"
        kind = ReplyKind.UNFINISHED if answer.finish_reason or not _is_empty(answer) else ReplyKind.EMPTY
        return ParsedReply(kind=kind, answer=answer, detail=detail)
    if _is_empty(answer):
        return ParsedReply(kind=ReplyKind.EMPTY, answer=answer, detail="no reasoning, no content, no tool call")
    return ParsedReply(ReplyKind.ANSWER, answer)


def _streamed(text: bytes) -> ReplyBody:
    """Return a stream joined; without an error it is whole only with finish reason, usage and end mark."""
    try:
        events = text.decode("utf-8")
        joined = join_stream(events)
    except (ValueError, TypeError, RecursionError) as exc:
        raise _IncompleteError(f"the stream was cut or is none: {type(exc).__name__}") from exc
    reply = REPLY_BODY.validate_python(joined)
    choice = next(iter(reply.get("choices") or []), None)
    if reply.get("error") is not None or (choice is not None and choice.get("error") is not None):
        return reply
    if choice is None or choice.get("finish_reason") is None:
        raise _IncompleteError("the stream ended without a finish reason")
    if reply.get("usage") is None:
        raise _IncompleteError("the stream ended without usage")
    if not any(line.removeprefix("data:").strip() == END for line in events[-200:].split("\n")):
        raise _IncompleteError(f"the stream ended without {END}")
    message = choice.setdefault("message", {})
    message["content"] = message.get("content") or None  # every event says "", also of an answer that has none
    return reply


def _generated(reply: ReplyBody) -> list[Choice] | None:
    """Return the choices of a `/generate` reply, whose text is content in which nothing was parsed; it gets a usage."""
    output_ids, meta = reply.get("output_ids"), reply.get("meta_info")
    if output_ids is None or meta is None:
        return None
    finish = meta.get("finish_reason")
    reason = _text(_mapping(finish).get("type")) or _text(finish)
    choice = Choice(
        message=Message(content=reply.get("text")),
        finish_reason=reason,
        native_finish_reason=reason,
        token_ids=output_ids,
        error=_mapping(finish).get("message") if reason == "abort" else None,
    )
    prompt_tokens, completion_tokens = (_integer(meta.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    reply["usage"] = None
    if prompt_tokens is not None and completion_tokens is not None:
        reply["usage"] = UsageBody(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    reply["id"] = _text(meta.get("id"))
    return [choice]


def _is_empty(answer: Answer) -> bool:
    return not answer.content and not answer.reasoning and not answer.tool_calls


def _answer(reply: ReplyBody, choice: Choice) -> Answer:
    message = choice.get("message", {})
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    details = message.get("reasoning_details")
    if reasoning is None and details:
        texts = [text for detail in details if (text := detail.get("text")) is not None]
        reasoning = "".join(texts) if texts else None
    calls, usage, logprobs = message.get("tool_calls"), reply.get("usage"), choice.get("logprobs")
    completion_ids = choice.get("token_ids") or choice.get("response_token_ids")
    prompt_ids = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
    meta = choice.get("meta_info")
    if meta:
        completion_ids = completion_ids or _ids(meta.get("output_token_ids"))
        prompt_ids = prompt_ids or _ids(meta.get("prompt_token_ids"))
    return Answer(  # by position, which costs little more than half as much
        reply.get("id"),
        reply.get("model"),
        reply.get("provider"),
        reasoning,
        message.get("content"),
        tuple(map(_tool_call, calls)) if calls else (),
        choice.get("finish_reason"),
        choice.get("native_finish_reason"),
        _usage(usage) if usage is not None else None,
        _cost(usage) if usage is not None else None,
        tuple(prompt_ids) if prompt_ids else None,
        tuple(completion_ids) if completion_ids else None,
        _token_bytes(logprobs) if logprobs is not None else None,
    )


def _ids(value: Any) -> list[int] | None:
    """Return token ids out of a member that no shape describes."""
    if not isinstance(value, list):
        return None
    ids = cast("list[Any]", value)
    return ids if all(type(token) is int for token in ids) else None


def _tool_call(call: ToolCallBody) -> ToolCall:
    function = call.get("function", {})
    return ToolCall(id=call.get("id") or "", name=function.get("name", ""), arguments=function.get("arguments") or "")


def _token_bytes(logprobs: Any) -> tuple[bytes, ...] | None:
    entries = _mapping(logprobs).get("content")
    if not isinstance(entries, list) or not entries:
        return None
    found: list[bytes] = []
    for entry in cast("list[Any]", entries):
        try:
            found.append(bytes(_mapping(entry)["bytes"]))
        except (KeyError, TypeError, ValueError):
            return None
    return tuple(found)


def _billing_only(reply: ReplyBody) -> Answer | None:
    return None if reply.get("usage") is None else _answer(reply, {})


def _usage(usage: UsageBody) -> Usage:
    completion, prompt = usage.get("completion_tokens_details"), usage.get("prompt_tokens_details")
    return Usage(
        usage.get("prompt_tokens", 0),
        usage.get("completion_tokens", 0),
        (completion if completion is not None else usage).get("reasoning_tokens"),
        prompt.get("cached_tokens") if prompt is not None else None,
    )


def _cost(usage: UsageBody) -> Decimal | None:
    cost = usage.get("cost")
    if cost is None:
        return None
    try:
        return money(cost)
    except InvalidOperation:  # a number no account can pay: not a cost
        return None


def _error_body(error: Any) -> ErrorBody:
    if not isinstance(error, dict):
        return ErrorBody(code=None, message=_text(error) or "")
    fields = cast("JsonObject", error)
    metadata = _mapping(fields.get("metadata"))
    availability = _mapping(fields.get("availability"))
    code = _integer(fields.get("code"))
    previous = metadata.get("previous_errors")
    provider = metadata.get("provider_name")
    if not provider and isinstance(previous, list) and previous:
        provider = _mapping(cast("list[Any]", previous)[-1]).get("provider_name")
    retryable = availability.get("retryable")
    return ErrorBody(
        code=code if code is not None else _integer(fields.get("http_status") or availability.get("http_status")),
        message=_text(fields.get("message")) or "",
        error_type=_text(metadata.get("error_type")),
        provider=_text(provider),
        availability=_text(availability.get("code")),
        is_retryable=retryable if isinstance(retryable, bool) else None,
        retry_after_s=_seconds(availability.get("retry_after")),
        is_moderation=bool(metadata.get("reasons") or metadata.get("flagged_input") or metadata.get("patterns")),
        raw=_text(metadata.get("raw")),
    )


def _mapping(value: Any) -> JsonObject:
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    is_number = isinstance(value, str) and value.isdecimal() and len(value) <= LONGEST_NUMBER
    return int(value) if is_number else None


def _seconds(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _text(value: Any) -> str | None:
    return str(value)[:500] if value else None
