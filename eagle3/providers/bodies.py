"""The shapes of reply bodies: what we use is typed and optional, everything else is ignored.

Typed dictionaries, not models: a reply becomes an `Answer` at once, and models cost twice as much to make. A member
that a server leaves out is absent, one that it sends as null is None.
"""

from decimal import Decimal
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from eagle3.records import JsonObject


class FunctionBody(TypedDict, total=False):
    """What a call calls."""

    name: str
    arguments: str | None


class ToolCallBody(TypedDict, total=False):
    """One call of a tool."""

    id: str | None
    function: FunctionBody


class ReasoningDetail(TypedDict, total=False):
    """A part of the reasoning, in OpenRouter's long form."""

    type: str
    text: str | None


class Message(TypedDict, total=False):
    """What the assistant said."""

    content: str | None
    reasoning: str | None
    reasoning_content: str | None
    reasoning_details: list[ReasoningDetail] | None
    tool_calls: list[ToolCallBody] | None


class Choice(TypedDict, total=False):
    """One answer; the ids and `meta_info` are what SGLang and vLLM add when asked."""

    message: Message
    finish_reason: str | None
    native_finish_reason: str | None
    error: Any
    token_ids: list[int] | None
    response_token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    logprobs: Any
    meta_info: JsonObject | None


class PromptDetails(TypedDict, total=False):
    """Of the prompt's tokens."""

    cached_tokens: int | None


class CompletionDetails(TypedDict, total=False):
    """Of the answer's tokens."""

    reasoning_tokens: int | None


class UsageBody(TypedDict, total=False):
    """Counts and, from some services, the bill in dollars."""

    prompt_tokens: int
    completion_tokens: int
    cost: Decimal | None
    reasoning_tokens: int | None
    prompt_tokens_details: PromptDetails | None
    completion_tokens_details: CompletionDetails | None


class ReplyBody(TypedDict, total=False):
    """A chat completion, an error in any of its forms, or a reply of SGLang's `/generate`."""

    id: str | None
    model: str | None
    provider: str | None
    choices: list[Choice] | None
    usage: UsageBody | None
    error: Any
    prompt_token_ids: list[int] | None
    object: str | None
    message: Any
    code: Any
    text: str | None
    output_ids: list[int] | None
    meta_info: JsonObject | None


REPLY_BODY = TypeAdapter(ReplyBody)
"""Validates JSON text or what was read from it; raises pydantic's `ValidationError`."""
