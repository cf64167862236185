# ruff: noqa: E501 - one row a line
"""One row per entry of the failure catalogue of real clients: the shape that arrived, and what it must mean.

Rows whose duty lies with a later stage (markers in the text, rewritten ids, garbage) show here that the reply reaches it
untouched: nothing is parsed, stripped or repaired on the way. What we send
(`max_tokens` always, history untouched) and when we stop is shown by the tests of the providers and of the engine.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from eagle3.providers.base import RawReply, TransportFailure
from eagle3.providers.classify import Billing, Outcome, Verdict, classify

PADDING = b"\n         \n" * 19
USAGE = {"prompt_tokens": 21, "completion_tokens": 40, "cost": 0.0001}


@dataclass(frozen=True)
class Row:
    number: int
    source: str
    raw: RawReply
    verdict: Verdict
    billing: Billing
    holds: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values that the outcome, its answer or its usage must have."""


def raw(status: int | None, body: object = b"", failure: TransportFailure | None = None, **headers: str) -> RawReply:
    data = body if isinstance(body, bytes) else PADDING + json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return RawReply(status=status, headers=names, body=data, elapsed_s=1.0, failure=failure, message="m")


def error(code: object, message: str = "Provider returned error", **fields: object) -> dict[str, object]:
    return {"error": {"code": code, "message": message, **fields}}


def answer(finish: str | None = "stop", usage: object = USAGE, **message: object) -> dict[str, object]:
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
    return {"id": "gen-1", "model": "m/m-0127", "provider": "Chutes", "choices": [choice], "usage": usage}


def call(name: str, arguments: str, call_id: str) -> dict[str, object]:
    return {"index": 0, "type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


MARKED = "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
REJECTED, RETRY, ANSWERED, AMBIGUOUS = Verdict.SAMPLE_REJECTED, Verdict.RETRY, Verdict.ANSWERED, Verdict.AMBIGUOUS
BAD, PAUSE, STOP, LIMITED = Verdict.BAD_ANSWER, Verdict.OUT_OF_CREDITS, Verdict.RUN_REJECTED, Verdict.RATE_LIMITED
FREE, REPORTED, UNKNOWN = Billing.FREE, Billing.REPORTED, Billing.UNKNOWN
UPSTREAM = {"raw": '{"error":{"message":"bad"}}', "provider_name": "Together"}

ROWS = [
    Row(1, "openrouter-examples#14", raw(200, error(400, metadata=UPSTREAM)), REJECTED, FREE, {"code": 400}),
    Row(2, "laravel-openrouter#82", raw(200, {**error(502, metadata=UPSTREAM), "user_id": "user_x"}), RETRY, UNKNOWN, {"provider": "Together"}),
    Row(3, "python-sdk#44", raw(200, error("server_error", metadata={"raw": None})), RETRY, UNKNOWN),
    Row(4, "genkit#6259", raw(200, answer("insufficient_system_resource", content="x")), BAD, REPORTED),
    Row(5, "aider#3550", raw(200, {"error": {"message": "Overloaded"}}), RETRY, UNKNOWN),
    Row(6, "hermes-agent#24534", raw(200, answer(content=MARKED)), ANSWERED, REPORTED, {"content": MARKED, "tool_calls": ()}),
    Row(7, "Kimi-K2#89", raw(200, answer(reasoning=MARKED)), ANSWERED, REPORTED, {"reasoning": MARKED}),
    Row(8, "sglang#21377", raw(200, answer(content="<|tool_call_begin|>functionsexec5<|tool_call_end|>")), ANSWERED, REPORTED, {"content": "<|tool_call_begin|>functionsexec5<|tool_call_end|>"}),
    Row(9, "vllm#32146", raw(200, answer("tool_calls", tool_calls=[call("f", '{"name": "f"}', "call_abc123")])), ANSWERED, REPORTED, {"call_id": "call_abc123"}),
    Row(10, "llxprt-code#713", raw(200, answer("tool_calls", tool_calls=[call("Read", "{}", "functions_Read_0")])), ANSWERED, REPORTED, {"call_id": "functions_Read_0"}),
    Row(11, "vllm#37397", raw(200, answer(content="hm</think>yes", usage={**USAGE, "completion_tokens_details": {"reasoning_tokens": 9}})), ANSWERED, REPORTED, {"content": "hm</think>yes", "reasoning_tokens": 9}),
    Row(12, "Kimi-K2.5#9", raw(200, answer("length", reasoning="all of it")), ANSWERED, REPORTED, {"finish_reason": "length", "content": None}),
    Row(13, "vllm#42426", raw(200, answer(reasoning="!!!!!!")), ANSWERED, REPORTED, {"reasoning": "!!!!!!"}),
    Row(14, "Kimi-K2.5#23", raw(200, answer(content="ใน \ufffd的и")), ANSWERED, REPORTED, {"content": "ใน \ufffd的и"}),
    Row(15, "smg#1873", raw(200, answer(content="<think>x</think>y")), ANSWERED, REPORTED, {"content": "<think>x</think>y", "reasoning": None}),
    Row(16, "litellm#38199", raw(200, answer(content="", reasoning="", usage={"prompt_tokens": 0, "completion_tokens": 0})), BAD, REPORTED),
    Row(17, "suna#4099", raw(200, {"id": "gen-1", "choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}), AMBIGUOUS, UNKNOWN),
    Row(18, "hindsight#1355", raw(200, answer(content=None)), BAD, REPORTED),
    Row(19, "claude-mem#3569", raw(200, answer(content="", reasoning="it is done")), ANSWERED, REPORTED, {"content": ""}),
    Row(20, "oh-my-pi#9569", raw(402, error(402, "This request requires more credits, or fewer max_tokens. You requested up to 65536 tokens, but can only afford 1234")), PAUSE, FREE),
    Row(21, "opencode#12219", raw(402, error(402, "Prompt tokens limit exceeded: 230799 > 91442")), REJECTED, FREE),
    Row(21, "opencode#12219, limit", raw(402, error(402, "Insufficient credits. Visit the settings page and create a key with a higher monthly limit")), PAUSE, FREE),
    Row(22, "ClawQL#876", raw(403, error(403, "Key limit exceeded (total limit). Manage it using the settings page")), PAUSE, FREE),
    Row(23, "Roo-Code#12006", raw(402, error(402, "Insufficient credits. Add more using the credits page")), PAUSE, FREE),
    Row(24, "python-sdk#72", raw(200, PADDING, TransportFailure.DEADLINE, x_generation_id="gen-9"), AMBIGUOUS, UNKNOWN, {"generation_id": "gen-9"}),
    Row(25, "gpt-researcher#1565", raw(None, b"", TransportFailure.STALLED), AMBIGUOUS, UNKNOWN),
    Row(26, "instructor#1328", raw(200, answer(content=" Oi!")), ANSWERED, REPORTED, {"content": " Oi!"}),
    Row(27, "zeroclaw#3842", raw(200, PADDING, TransportFailure.DEADLINE), AMBIGUOUS, UNKNOWN),
    Row(28, "cline#60", raw(200, PADDING + json.dumps(answer(content="x" * 99)).encode()[:-40]), AMBIGUOUS, UNKNOWN),
    Row(29, "langchain#39333", raw(200, answer(content="x", usage={"prompt_tokens": 1, "completion_tokens": 2, "cost": None})), ANSWERED, REPORTED, {"cost_usd": None}),
    Row(30, "chat-ui#2482", raw(200, answer("length", content="x")), ANSWERED, REPORTED, {"finish_reason": "length"}),
    Row(31, "litellm-docs#559", raw(200, answer("length", content="", reasoning="r" * 199)), ANSWERED, REPORTED, {"finish_reason": "length"}),
    Row(32, "vm0#32117", raw(429, error(429, "m is temporarily rate-limited upstream"), retry_after="3"), LIMITED, FREE, {"retry_after_s": 3.0}),
    Row(33, "opencode#13318", raw(502, error(502, metadata={"provider_name": None, "previous_errors": [{"provider_name": "Inceptron"}]})), RETRY, UNKNOWN, {"provider": "Inceptron"}),
    Row(34, "opencode#1558", raw(404, error(404, "No endpoints found that support tool use")), STOP, FREE),
    Row(35, "chat-ollama#695", raw(200, answer("content_filter", content="", usage={"prompt_tokens": 9, "completion_tokens": 0, "cost": 0})), REJECTED, REPORTED, {"cost_usd": 0}),
    Row(36, "ComfyUI#16204", raw(None, b"", TransportFailure.CUT), AMBIGUOUS, UNKNOWN),
    *(Row(37, f"lotti#4338, {status}", raw(status, error(status)), LIMITED if status == 429 else RETRY, FREE) for status in (429, 503, 529)),
    *(Row(37, f"lotti#4338, {status}", raw(status, error(status)), RETRY, UNKNOWN) for status in (502, 504, 524)),
]  # fmt: skip


def value_of(outcome: Outcome, name: str) -> Any:
    parsed = outcome.parsed.answer if outcome.parsed is not None else None
    if name == "call_id":
        return parsed.tool_calls[0].id if parsed is not None else None
    if name == "reasoning_tokens":
        return parsed.usage.reasoning_tokens if parsed is not None and parsed.usage is not None else None
    return getattr(outcome if hasattr(outcome, name) else parsed, name)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.number} {row.source}" for row in ROWS])
def test_every_shape_of_the_catalogue_has_its_meaning(row: Row):
    outcome = classify(row.raw)
    assert (outcome.verdict, outcome.billing) == (row.verdict, row.billing), outcome
    for name, wanted in row.holds.items():
        assert value_of(outcome, name) == wanted


def test_the_catalogue_is_whole():
    assert {row.number for row in ROWS} == set(range(1, 38))
