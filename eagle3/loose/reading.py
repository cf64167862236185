"""Reading loose reply files: JSON Lines in whatever shape clients record, leniently and without losing a line.

A line holds the request and the reply, the reply either parsed (`message`, `usage`, `finish_reason`, `provider`,
`streamed`), or as a whole body (`response`), or as received (`raw_body`: JSON after keep-alive whitespace, or a stream
of events). A line that cannot be read is a record with a finding, never an exception.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from eagle3.errors import InputError
from eagle3.providers.stream import is_stream, join_stream
from eagle3.providers.wire import Answer, ParsedReply, ReplyKind, parse_reply
from eagle3.records import AuditFinding, Completion, JsonObject, PromptRecord, Severity, Usage

UNKNOWN = "unknown"
"""Provider or model of a line that names none."""
DATASET = "file"
MAX_COUNT = 2**31
"""Counts are 32-bit in our files; a larger one is no count of tokens."""
ODDITIES = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError)
"""What a line of unknown making may raise in a parser or a template: the line is told, the file goes on."""
_COUNTS = ("prompt_tokens", "completion_tokens")
_BODY_KEYS = ("raw_body", "response")
_CHOICE_KEYS = ("token_ids", "response_token_ids", "logprobs", "native_finish_reason", "meta_info")
_KIND_FINDINGS = {
    ReplyKind.UNFINISHED: ("finish-reason", Severity.WARNING),
    ReplyKind.EMPTY: ("empty-reply", Severity.WARNING),
    ReplyKind.CHOICE_ERROR: ("error-reply", Severity.ERROR),
    ReplyKind.PARTIAL_REASONING: ("partial-reasoning", Severity.ERROR),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LooseReply:
    """One line of the file."""

    line: int
    """Number of the line, from 1."""
    provider: str
    model: str
    """As asked for; as named in the reply when the request is not there."""
    reply_model: str | None
    """As named in the reply."""
    prompt: PromptRecord
    """Empty when the line holds no request."""
    completion: Completion | None
    """None when the line holds no answer at all."""
    wants_thinking: bool | None
    """What the request says about thinking; None when it says nothing."""
    findings: tuple[AuditFinding, ...] = ()


def read_loose_replies(path: Path) -> list[LooseReply]:
    """Read a file of loose replies; blank lines are passed over.

    Raises:
        InputError: The file cannot be read or holds no line.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise InputError(f"reply file {str(path)!r} cannot be read: {exc.strerror}. Give a JSON Lines file.") from exc
    # Only the newline byte ends a line; U+2028 and its like are text.
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    if not lines:
        raise InputError(
            f"reply file {str(path)!r} holds no line. Expected JSON Lines with request, and message or raw_body."
        )
    return [parse_line(number, line) for number, line in lines]


def parse_line(number: int, line: bytes) -> LooseReply:
    """Read one line; whatever is wrong with it becomes a finding."""
    try:
        document: object = json.loads(line)
    except (ValueError, RecursionError) as exc:
        return _bad(number, {}, f"not JSON: {exc}")
    if not isinstance(document, dict):
        return _bad(number, {}, f"{type(document).__name__}, expected an object")
    values = cast("JsonObject", document)
    reading = _Reading(number, values)
    try:
        body = reading.body()
        parsed = parse_reply(json.dumps(body).encode())
    except _NoReplyError as exc:
        return _bad(number, values, str(exc))
    except ODDITIES as exc:
        return _bad(number, values, f"no reply: {type(exc).__name__}: {exc}")
    answer = parsed.answer
    if answer is None or parsed.kind in (ReplyKind.ERROR, ReplyKind.MALFORMED, ReplyKind.PADDING_ONLY):
        return _bad(number, values, _reason(parsed), provider=_name(body.get("provider")))
    if parsed.kind in _KIND_FINDINGS:
        rule, severity = _KIND_FINDINGS[parsed.kind]
        reading.note(rule, severity, _reason(parsed))
    return reading.reply(answer)


class _NoReplyError(Exception):
    """A line without a reply."""


@dataclass
class _Reading:
    number: int
    values: JsonObject
    findings: list[AuditFinding] = field(default_factory=list[AuditFinding])

    def note(self, rule: str, severity: Severity, detail: str) -> None:
        self.findings.append(_finding(self.number, self.values, rule, severity, detail))

    def body(self) -> JsonObject:
        """Return the reply as the body of a chat completion, its oddities evened out and noted."""
        values = self.values
        whole = next((values[key] for key in _BODY_KEYS if values.get(key) is not None), None)
        if isinstance(whole, str):
            whole = join_stream(whole) if is_stream(whole) else json.loads(whole.strip())
        if whole is None and isinstance(values.get("choices"), list):
            whole = values
        if whole is None and isinstance(values.get("message"), dict):
            choice = {key: values[key] for key in _CHOICE_KEYS if key in values}
            choice |= {"message": values["message"], "finish_reason": values.get("finish_reason")}
            kept = {key: values[key] for key in ("id", "model", "prompt_token_ids") if key in values}
            whole = {**kept, "choices": [choice], "usage": values.get("usage")}
        if not isinstance(whole, dict):
            found = sorted(values)[:8]
            raise _NoReplyError(f"no reply: expected message, response or raw_body, found keys {found}")
        body = dict(cast("JsonObject", whole))
        for key in ("id", "model", "provider"):
            if not isinstance(body.get(key), str):
                body[key] = None
        body["usage"] = self._usage(body.get("usage"))
        choices = body.get("choices")
        if isinstance(choices, list):
            body["choices"] = [self._choice(entry) for entry in cast("list[object]", choices)]
        return body

    def _usage(self, usage: object) -> JsonObject | None:
        if usage is None:
            self.note("no-usage", Severity.WARNING, "nothing was billed, so no count can be checked")
            return None
        values = _mapping(usage)
        kept: JsonObject = {key: count for key in _COUNTS if (count := _count(values.get(key))) is not None}
        details = _mapping(values.get("completion_tokens_details"))
        if _count(details.get("reasoning_tokens")) is not None:
            kept["completion_tokens_details"] = {"reasoning_tokens": details["reasoning_tokens"]}
        if not kept.get("completion_tokens"):
            self.note("no-usage", Severity.WARNING, "usage holds no completion_tokens, so no count can be checked")
        return kept

    def _choice(self, entry: object) -> object:
        if not isinstance(entry, dict):
            return entry
        choice = dict(cast("JsonObject", entry))
        for key in ("finish_reason", "native_finish_reason"):
            if choice.get(key) is not None and not isinstance(choice[key], str):
                choice[key] = str(choice[key])
        message = choice.get("message")
        if not isinstance(message, dict):
            return choice
        message = dict(cast("JsonObject", message))
        if isinstance(message.get("content"), list):
            parts = [cast("JsonObject", part) for part in message["content"] if isinstance(part, dict)]
            message["content"] = "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message["tool_calls"] = [self._call(call) for call in cast("list[object]", calls)]
        return {**choice, "message": message}

    def _call(self, call: object) -> object:
        function = cast("JsonObject", call).get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        function = cast("JsonObject", function)
        if isinstance(function.get("arguments"), (dict, list)):
            self.note("arguments-parsed", Severity.WARNING, "tool arguments came parsed; their spelling is lost")
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return {**cast("JsonObject", call), "function": function}

    def reply(self, answer: Answer) -> LooseReply:
        """Return the line's record."""
        request = _request(self.values)
        provider = _name(self.values.get("provider")) or _name(answer.provider) or UNKNOWN
        model = _name(request.get("model")) or _name(self.values.get("model")) or _name(answer.model) or UNKNOWN
        completion = Completion(
            sample_id=sample_id(self.number),
            dataset=DATASET,
            reasoning=answer.reasoning,
            content=answer.content,
            tool_calls=answer.tool_calls,
            finish_reason=answer.finish_reason or "missing",
            native_finish_reason=answer.native_finish_reason,
            provider=provider,
            model=model,
            quantization=None,
            generation_id=answer.generation_id,
            usage=answer.usage or Usage(prompt_tokens=0, completion_tokens=0),
            cost_usd=answer.cost_usd or Decimal(0),
            cost_is_estimated=False,
            prompt_token_ids=answer.prompt_token_ids,
            completion_token_ids=answer.completion_token_ids,
            latency_s=0.0,
            attempts=1,
            from_cache=False,
            raw_body=b"",
            token_bytes=answer.token_bytes,
        )
        return LooseReply(
            line=self.number,
            provider=provider,
            model=model,
            reply_model=_name(answer.model),
            prompt=_prompt(self.number, request),
            completion=completion,
            wants_thinking=_wants_thinking(request),
            findings=tuple(self.findings),
        )


def _mapping(value: object) -> JsonObject:
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    """Return a billed count; anything else than a number of tokens tells nothing."""
    return value if type(value) is int and 0 <= value < MAX_COUNT else None


def sample_id(number: int) -> str:
    """Return the sample id of a line."""
    return f"line-{number}"


def _request(values: Mapping[str, Any]) -> JsonObject:
    request: object = values.get("request")
    if isinstance(request, str):
        try:
            request = json.loads(request)
        except ValueError:
            request = None
    return cast("JsonObject", request) if isinstance(request, dict) else {}


def _prompt(number: int, request: Mapping[str, Any]) -> PromptRecord:
    def objects(value: object) -> list[JsonObject]:
        entries = cast("list[object]", value) if isinstance(value, list) else []
        return [cast("JsonObject", entry) for entry in entries if isinstance(entry, dict)]

    return PromptRecord(
        sample_id=sample_id(number),
        dataset=DATASET,
        prompt_id=sample_id(number),
        messages=objects(request.get("messages")),
        tools=objects(request.get("tools")),
    )


def _wants_thinking(request: Mapping[str, Any]) -> bool | None:
    """Read the ways in which clients switch thinking on and off."""
    reasoning, thinking = request.get("reasoning"), request.get("thinking")
    options = request.get("chat_template_kwargs")
    if isinstance(reasoning, dict):
        switch = cast("JsonObject", reasoning)
        if isinstance(switch.get("enabled"), bool):
            return switch["enabled"]
        if switch.get("effort") is not None:
            return switch["effort"] != "none"
    if isinstance(thinking, dict) and isinstance(cast("JsonObject", thinking).get("type"), str):
        return cast("JsonObject", thinking)["type"] != "disabled"
    for source in (cast("JsonObject", options) if isinstance(options, dict) else {}, request):
        for key in ("thinking", "enable_thinking"):
            if isinstance(source.get(key), bool):
                return source[key]
    return None


def _bad(number: int, values: Mapping[str, Any], detail: str, provider: str | None = None) -> LooseReply:
    request = _request(values)
    name = _name(values.get("provider")) or provider or UNKNOWN
    return LooseReply(
        line=number,
        provider=name,
        model=_name(request.get("model")) or UNKNOWN,
        reply_model=None,
        prompt=_prompt(number, request),
        completion=None,
        wants_thinking=None,
        findings=(_finding(number, {"provider": name}, "bad-line", Severity.ERROR, detail),),
    )


def _finding(number: int, values: Mapping[str, Any], rule: str, severity: Severity, detail: str) -> AuditFinding:
    return AuditFinding(
        rule=rule,
        severity=severity,
        sample_id=sample_id(number),
        detail=" ".join(detail.split())[:300],
        provider=_name(values.get("provider")),
    )


def _reason(parsed: ParsedReply) -> str:
    said = parsed.error.message if parsed.error is not None else ""
    return f"{parsed.kind.value}: {parsed.detail or said}"


def _name(value: object) -> str | None:
    return storable(value) if isinstance(value, str) and value else None


def storable(text: str) -> str:
    """Return text that any file can hold: halves of surrogate pairs become question marks."""
    return text.encode("utf-8", "replace").decode()
