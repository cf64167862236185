"""Easy questions that any model answers alike, so that nobody has to record them: what probes ask.

"Reply with exactly: X" and its Chinese form, "Call the tool T with K = 7", and counting. Ids are laid down as for
scripted answers, so counts, bills and cuts are those of a model that obeys.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from eagle3.simulator.answers import Answer
from eagle3.simulator.scripted import Script

_EXACTLY = re.compile(r"(?:Reply with exactly|只回复): (.+)", re.DOTALL)
_TOOL = re.compile(r"Call the tool (\w+) with (\w+) = (\d+)\b")
_COUNT = re.compile(r"Count from \d+ to \d+")
_THOUGHT = "The user wants a plain answer."
_COUNTED = "\n".join(
    f"{tens} {ones}" for tens in ("twenty", "thirty", "forty", "fifty") for ones in ("one", "two", "six")
)


class Improviser:
    """Answers easy questions."""

    def __init__(self, script: Script) -> None:
        """Lay ids down with a script's tokenizer and grammar."""
        self._script = script

    def answer(self, request: Mapping[str, Any], max_tokens: int | None) -> Answer | None:
        """The answer to a chat request, cut to `max_tokens`; null when the question is not an easy one."""
        messages: list[dict[str, Any]] = request["messages"]
        question: Any = messages[-1].get("content")
        record = self._record(question, bool(request.get("tools"))) if isinstance(question, str) else None
        if record is None:
            return None
        fields = {"messages": messages, "tools": request.get("tools") or (), **record}
        whole = self._script.answer(fields)
        return whole if max_tokens is None else self._cut(whole, max_tokens)

    def _record(self, question: str, has_tools: bool) -> dict[str, Any] | None:  # noqa: FBT001 - private
        reasoning = _THOUGHT if self._script.close_id is not None else None
        exactly = _EXACTLY.fullmatch(question)
        if exactly is not None:
            return {"reasoning": reasoning, "content": exactly.group(1), "finish_reason": "stop"}
        if _COUNT.match(question):
            return {"reasoning": reasoning, "content": _COUNTED, "finish_reason": "stop"}
        call = _TOOL.match(question)
        if call is not None and has_tools and self._script.has_tools:
            arguments = json.dumps({call.group(2): int(call.group(3))})
            calls = [{"id": f"functions.{call.group(1)}:0", "name": call.group(1), "arguments": arguments}]
            return {"reasoning": reasoning, "content": None, "tool_calls": calls, "finish_reason": "tool_calls"}
        return None

    def _cut(self, answer: Answer, max_tokens: int) -> Answer:
        """The answer as the ids that fit show it; a cut tool call shows nothing."""
        if len(answer.output_ids) <= max_tokens:
            return answer
        kept = answer.output_ids[:max_tokens]
        close_id, decode = self._script.close_id, self._script.decode
        reasoning: str | None = None
        rest = kept
        is_closed = False
        if close_id is not None:
            is_closed = close_id in kept
            stop = kept.index(close_id) if is_closed else len(kept)
            reasoning, rest = decode(kept[:stop]), kept[stop + 1 :]
        content = decode(rest) if rest and not answer.tool_calls else None
        return replace(
            answer,
            output_ids=kept,
            finish_reason=cast("Any", "length"),
            reasoning=reasoning,
            content=content,
            tool_calls=(),
            is_reasoning_closed=is_closed and answer.is_reasoning_closed,
            is_ended=False,
        )
