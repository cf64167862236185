"""What happens to an answer between the model and the client: the provider's text habits, and faults of content.

Pure. The true ids stay in the answer; what is rendered here is all a client sees.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from eagle3.simulator.account import ZERO, price
from eagle3.simulator.answers import Answer, ToolCall
from eagle3.simulator.scenario import FaultKind, Provider


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One completion as the provider reports and bills it."""

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    prompt_usd: Decimal
    completion_usd: Decimal
    error: str | None = None
    """Message of an error that ended the generation."""

    @property
    def cost_usd(self) -> Decimal:
        """What the account pays."""
        return self.prompt_usd + self.completion_usd


def render(answer: Answer, provider: Provider, fault: FaultKind | None = None) -> Outcome:
    """The completion a client of `provider` would get."""
    match fault:
        case FaultKind.EMPTY:
            return _outcome(provider, content="", finish_reason="stop", prompt_tokens=len(answer.prompt_ids))
        case FaultKind.BLANK:
            return _outcome(provider, content="", finish_reason=None, is_insured=True)
        case FaultKind.CONTENT_FILTER:
            return _outcome(
                provider,
                content="",
                finish_reason="content_filter",
                prompt_tokens=len(answer.prompt_ids),
                is_insured=True,
            )
        case FaultKind.ERROR_IN_200 | FaultKind.CHOICE_ERROR:
            reasoning, content, _ = apply_habits(answer, provider)
            return _outcome(
                provider,
                reasoning=_first_half(reasoning),
                content=_first_half(content),
                finish_reason="error",
                prompt_tokens=len(answer.prompt_ids),
                completion_tokens=len(answer.output_ids) // 2,
                is_insured=True,
                error="Provider returned error",
            )
        case _:
            reasoning, content, tool_calls = apply_habits(answer, provider)
            hidden = 1 if answer.is_ended and not provider.end_token_billed else 0
            return _outcome(
                provider,
                reasoning=reasoning,
                content=content,
                tool_calls=tool_calls,
                finish_reason=answer.finish_reason,
                prompt_tokens=len(answer.prompt_ids),
                completion_tokens=len(answer.output_ids) - hidden,
                reasoning_tokens=answer.num_reasoning_tokens,
            )


def apply_habits(answer: Answer, provider: Provider) -> tuple[str | None, str | None, tuple[ToolCall, ...]]:
    """Reasoning, content and tool calls as this provider writes them."""
    reasoning, content = answer.reasoning, answer.content
    if provider.space_around_control_tokens:
        reasoning = _spaced(
            reasoning,
            before=answer.is_reasoning_opened,
            after=answer.is_reasoning_closed or bool(answer.tool_calls),
        )
        content = _spaced(content, before=answer.is_reasoning_closed, after=answer.is_ended or bool(answer.tool_calls))
    calls = answer.tool_calls
    if provider.tool_arguments != "verbatim":
        separators = (",", ":") if provider.tool_arguments == "compact" else (", ", ": ")
        calls = tuple(
            ToolCall(id=c.id, name=c.name, arguments=_rewritten(c.arguments, separators)) for c in answer.tool_calls
        )
    return reasoning, content, calls


def _spaced(text: str | None, *, before: bool, after: bool) -> str | None:
    if not text:
        return text
    return (" " if before else "") + text + (" " if after else "")


def _rewritten(arguments: str, separators: tuple[str, str]) -> str:
    try:
        parsed: Any = json.loads(arguments)
    except ValueError:
        return arguments
    return json.dumps(parsed, separators=separators, ensure_ascii=False)


def _first_half(text: str | None) -> str | None:
    return None if text is None else text[: len(text) // 2]


def _outcome(
    provider: Provider,
    *,
    content: str | None,
    finish_reason: str | None,
    reasoning: str | None = None,
    tool_calls: Sequence[ToolCall] = (),
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    reasoning_tokens: int = 0,
    is_insured: bool = False,
    error: str | None = None,
) -> Outcome:
    return Outcome(
        reasoning=reasoning,
        content=content,
        tool_calls=tuple(tool_calls),
        finish_reason=finish_reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        reasoning_tokens=reasoning_tokens,
        prompt_usd=ZERO if is_insured else price(prompt_tokens, provider.prompt_usd_per_mtok),
        completion_usd=ZERO if is_insured else price(completion_tokens, provider.completion_usd_per_mtok),
        error=error,
    )
