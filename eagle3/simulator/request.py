"""A chat request as received: its bytes checked and the keys that identify it. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from eagle3.simulator import bodies
from eagle3.simulator.answers import canonical_json, key_of
from eagle3.simulator.scenario import Model, Scenario

Json = dict[str, Any]

DEFAULT_CACHE_TTL_S = 300
MAX_CACHE_TTL_S = 86_400


class RefusedError(Exception):
    """The request ends here with an error reply."""

    def __init__(self, status: int, body: Json, after_s: float = 0.0) -> None:
        """Refuse with an HTTP status and a complete error body, `after_s` from now."""
        super().__init__(status)
        self.status = status
        self.body = body
        self.after_s = after_s


def refused(status: int, message: str, error_type: str, *, after_s: float = 0.0, **availability: Any) -> RefusedError:
    """A refusal in OpenRouter's shape, to be sent after `after_s`; further keywords become `error.availability`."""
    body = bodies.error(status, message, error_type=error_type, availability=availability or None)
    return RefusedError(status, body, after_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A well-formed chat request."""

    fields: Json
    """The whole body, parsed."""
    model: Model
    messages_key: str
    """Digest of the messages, by which answers are recorded."""
    replica: str
    """Seed and metadata as text: what tells several requests for the same messages apart."""
    sample_key: str
    """Digest of messages and replica: attempts and faults are counted by it, whatever the routing of an attempt."""
    body_digest: str
    """sha256 of the body's bytes."""
    max_tokens: int | None
    is_streamed: bool
    cache_key: str | None
    """Key of the response cache; null unless the client asked for it."""
    cache_ttl_s: int
    clears_cache: bool
    """A reply kept under `cache_key` is to be forgotten first."""


def parse_request(scenario: Scenario, key: str, headers: Mapping[str, str], body: bytes) -> ChatRequest:
    """Check the fields that decide anything here; other fields pass unread.

    Args:
        scenario: Knows the models.
        key: The API key, part of the cache key.
        headers: Names in lower case.
        body: As received.

    Raises:
        RefusedError: 400 that names the field at fault.
    """
    try:
        document: Any = json.loads(body)
    except ValueError as exc:
        raise refused(400, f"Invalid JSON in request body: {exc}", "invalid_request") from exc
    wrong = _first_fault(document)
    if wrong is not None:
        raise refused(400, f"Invalid request: {wrong}", "invalid_request")
    fields = cast("Json", document)
    model = scenario.model(fields["model"])
    if model is None:
        raise refused(400, f"{fields['model']} is not a valid model ID", "invalid_request", code="model_not_found")
    digest = hashlib.sha256(body).hexdigest()
    is_streamed: bool = fields.get("stream") or False
    cache_key, ttl_s = None, DEFAULT_CACHE_TTL_S
    if headers.get("x-openrouter-cache", "").lower() == "true":
        ttl_s = _cache_ttl_s(headers)
        parts = "\0".join((key, model.id, str(is_streamed), digest))
        cache_key = hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()
    messages_key = key_of(fields["messages"])
    replica = canonical_json([fields.get("seed"), fields.get("metadata")])
    return ChatRequest(
        fields=fields,
        model=model,
        messages_key=messages_key,
        replica=replica,
        sample_key=key_of([messages_key, replica]),
        body_digest=digest,
        max_tokens=_max_tokens(fields),
        is_streamed=is_streamed,
        cache_key=cache_key,
        cache_ttl_s=ttl_s,
        clears_cache=headers.get("x-openrouter-cache-clear", "").lower() == "true",
    )


def _first_fault(document: Any) -> str | None:
    if not isinstance(document, dict):
        return "expected a JSON object"
    fields = cast("Json", document)
    messages: Any = fields.get("messages")
    max_tokens: Any = _max_tokens(fields)
    if not isinstance(fields.get("model"), str):
        return "model: expected a string"
    if not isinstance(messages, list) or not messages:
        return "messages: expected a non-empty array"
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in cast("list[Any]", messages)):
        return "messages: expected objects with a role"
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1):
        return "max_tokens: expected a positive integer"
    if not isinstance(fields.get("stream"), bool | None):
        return "stream: expected a boolean"
    return None


def _max_tokens(fields: Json) -> Any:
    value = fields.get("max_tokens")
    return fields.get("max_completion_tokens") if value is None else value


def _cache_ttl_s(headers: Mapping[str, str]) -> int:
    stated = headers.get("x-openrouter-cache-ttl")
    if stated is None:
        return DEFAULT_CACHE_TTL_S
    if not stated.isdecimal() or not 1 <= int(stated) <= MAX_CACHE_TTL_S:
        raise refused(400, f"X-OpenRouter-Cache-TTL: expected 1 to {MAX_CACHE_TTL_S} seconds", "invalid_request")
    return int(stated)
