"""JSON bodies of the chat endpoint in OpenRouter's shapes and key order. Pure builders; no state, no I/O.

Source: recorded traffic of 2026-04-27 for success bodies and chunks; the published OpenAPI file for errors.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from eagle3.simulator.answers import ToolCall
from eagle3.simulator.habits import Outcome

Json = dict[str, Any]

PADDING = b"\n         \n"
"""Keep-alive whitespace sent before the JSON while the model works."""
COMMENT = b": OPENROUTER PROCESSING\n\n"
"""Keep-alive line of a stream."""
STREAM_END = b"data: [DONE]\n\n"

EDGE_TIMEOUT_PAGE = (
    b"<!DOCTYPE html><html><head><title>524: A timeout occurred</title></head>"
    b"<body><h1>Error 524</h1><p>A timeout occurred</p></body></html>"
)

_PIECE = re.compile(r"\s*\S{1,12}|\s+")


def encode(body: Json) -> bytes:
    """Compact UTF-8 JSON; a lone surrogate is escaped, as no encoder can send it."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(body, separators=(",", ":")).encode()


def usage(outcome: Outcome) -> Json:
    """Usage as billed. Money is a JSON number on this wire; it is exact to the 15 digits a double keeps."""
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        "cost": float(outcome.cost_usd),
        "is_byok": False,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": 0,
            "audio_tokens": 0,
            "video_tokens": 0,
        },
        "cost_details": {
            "upstream_inference_cost": float(outcome.cost_usd),
            "upstream_inference_prompt_cost": float(outcome.prompt_usd),
            "upstream_inference_completions_cost": float(outcome.completion_usd),
        },
        "completion_tokens_details": {
            "reasoning_tokens": outcome.reasoning_tokens,
            "image_tokens": 0,
            "audio_tokens": 0,
        },
    }


def zero_usage() -> Json:
    """Usage of a reply from the response cache: nothing was generated, nothing is billed."""
    return {
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "total_tokens": 0,
        "cost": 0,
        "is_byok": False,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": 0,
            "audio_tokens": 0,
            "video_tokens": 0,
        },
        "cost_details": {
            "upstream_inference_cost": 0,
            "upstream_inference_prompt_cost": 0,
            "upstream_inference_completions_cost": 0,
        },
        "completion_tokens_details": {"reasoning_tokens": 0, "image_tokens": 0, "audio_tokens": 0},
    }


def _reasoning_details(text: str) -> list[Json]:
    return [{"type": "reasoning.text", "text": text, "format": "unknown", "index": 0}]


def _tool_call(index: int, call: ToolCall) -> Json:
    return {
        "type": "function",
        "index": index,
        "id": call.id,
        "function": {"name": call.name, "arguments": call.arguments},
    }


def completion(
    outcome: Outcome,
    *,
    generation_id: str,
    created: int,
    model: str,
    provider: str,
    token_ids: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Json:
    """A whole `chat.completion` body.

    Args:
        outcome: What the provider reports.
        generation_id: `gen-…`, also in the `X-Generation-Id` header.
        created: Unix time.
        model: Permanent slug.
        provider: Display name.
        token_ids: (prompt ids, output ids), when asked for and offered.
    """
    message: Json = {
        "role": "assistant",
        "content": None if outcome.tool_calls and not outcome.content else outcome.content,
        "refusal": None,
        "reasoning": outcome.reasoning,
    }
    if outcome.tool_calls:
        message["tool_calls"] = [_tool_call(i, call) for i, call in enumerate(outcome.tool_calls)]
    if outcome.reasoning:
        message["reasoning_details"] = _reasoning_details(outcome.reasoning)
    choice: Json = {
        "index": 0,
        "logprobs": None,
        "finish_reason": outcome.finish_reason,
        "native_finish_reason": outcome.finish_reason,
        "message": message,
    }
    if outcome.error is not None:
        choice["error"] = {
            "code": 502,
            "message": outcome.error,
            "metadata": {"error_type": "provider_unavailable", "provider_name": provider},
        }
    if token_ids is not None:
        choice["prompt_token_ids"], choice["token_ids"] = list(token_ids[0]), list(token_ids[1])
    return {
        "id": generation_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "provider": provider,
        "system_fingerprint": None,
        "choices": [choice],
        "usage": usage(outcome),
    }


def error(
    code: int,
    message: str,
    *,
    error_type: str | None = None,
    provider: str | None = None,
    raw: str | None = None,
    availability: Json | None = None,
) -> Json:
    """An error body, `{"error": {...}}`."""
    inner: Json = {"message": message, "code": code}
    metadata: Json = {}
    if raw is not None:
        metadata["raw"] = raw
    if provider is not None:
        metadata["provider_name"] = provider
    if error_type is not None:
        metadata["error_type"] = error_type
    if metadata:
        inner["metadata"] = metadata
    if availability is not None:
        inner["availability"] = availability
    return {"error": inner}


def event(chunk: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(chunk) + b"\n\n"


def chunks_of(completion_body: Json) -> Iterator[Json]:
    """The stream of a whole body: deltas, the finish, and the usage with its second finish reason.

    Concatenating the deltas gives the body's texts unchanged.
    """
    choice = completion_body["choices"][0]
    message = choice["message"]
    base = {key: completion_body[key] for key in ("id", "created", "model", "provider")}
    base = {"id": base["id"], "object": "chat.completion.chunk", **base}

    def chunk(delta: Json, finish: str | None = None) -> Json:
        return {
            **base,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "native_finish_reason": finish}],
        }

    for piece in _PIECE.findall(message["reasoning"] or ""):
        delta: Json = {"content": "", "role": "assistant", "reasoning": piece}
        yield chunk({**delta, "reasoning_details": _reasoning_details(piece)})
    for piece in _PIECE.findall(message["content"] or ""):
        yield chunk({"content": piece, "role": "assistant"})
    for call in message.get("tool_calls", ()):
        arguments: str = call["function"]["arguments"]
        opening = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
        yield chunk({"content": None, "role": "assistant", "tool_calls": [opening]})
        for piece in _PIECE.findall(arguments):
            part = {"index": call["index"], "function": {"arguments": piece}}
            yield chunk({"content": None, "role": "assistant", "tool_calls": [part]})
    finish = choice["finish_reason"]
    last = chunk({"content": "", "role": "assistant", "reasoning": None}, finish)
    if choice.get("error") is not None:
        last["error"] = choice["error"]
    if "token_ids" in choice:
        last["choices"][0]["prompt_token_ids"] = choice["prompt_token_ids"]
        last["choices"][0]["token_ids"] = choice["token_ids"]
    yield last
    if choice.get("error") is None:
        yield {**chunk({"content": "", "role": "assistant"}, finish), "usage": completion_body["usage"]}
