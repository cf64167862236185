"""Scripted answers become token ids: what a model of a given family would have generated to say them.

Deliberately apart from `eagle3.tokens.layout`, which rebuilds ids from replies: here the ids are laid down first and
the reply follows from them, so that the two can be held against each other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from eagle3.simulator.answers import Answer, Decode, ToolCall
from eagle3.tokens.grammar import Mode, Part, ResponseGrammar, load_grammar
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.tokenizer import Tokenizer, load_tokenizer


class Script:
    """Turns scripted lines into answers of one model family."""

    def __init__(self, directory: Path, grammar_name: str, mode_name: str | None = None) -> None:
        """Load the tokenizer, the grammar and the chat template.

        Args:
            directory: Model directory.
            grammar_name: Packaged name, or path to a YAML file.
            mode_name: Mode of the grammar; null takes its first.

        Raises:
            TokenError: One of them is missing, damaged, or disagrees with another.
        """
        self._grammar: ResponseGrammar = load_grammar(grammar_name)
        name = mode_name or next(iter(self._grammar.modes))
        self._mode: Mode = self._grammar.mode(name)
        self._tokenizer: Tokenizer = load_tokenizer(directory, self._grammar)
        self._renderer = PromptRenderer(directory, self._grammar, self._tokenizer, name)

    @property
    def decode(self) -> Decode:
        """Ids of plain text to text."""
        return self._tokenizer.decode

    @property
    def close_id(self) -> int | None:
        """Id that ends the reasoning; null when this mode generates none."""
        return None if self._mode.close is None else self._tokenizer.control_id(self._mode.close)

    @property
    def has_tools(self) -> bool:
        """Whether the family has tool calls."""
        return self._grammar.tools is not None

    def answer(self, record: Mapping[str, Any]) -> Answer:
        """Lay down the ids of one scripted line.

        Raises:
            KeyError, TypeError: A field is missing or of the wrong type.
            ValueError: The grammar has no way to say it.
        """
        reasoning, content = cast("str | None", record.get("reasoning")), cast("str | None", record.get("content"))
        calls = tuple(
            ToolCall(id=str(call["id"]), name=str(call["name"]), arguments=str(call["arguments"]))
            for call in record.get("tool_calls") or ()
        )
        finish: Any = record["finish_reason"]
        if finish not in ("stop", "length", "tool_calls"):
            raise ValueError(f"finish_reason is {finish!r}, expected 'stop', 'length' or 'tool_calls'")
        mode, grammar = self._mode, self._grammar
        if reasoning and mode.reasoning is None:
            raise ValueError(f"grammar {grammar.name!r} does not reason in this mode")
        if calls and grammar.tools is None:
            raise ValueError(f"grammar {grammar.name!r} has no tool calls")
        is_cut_in_reasoning = finish == "length" and mode.reasoning is not None and not content and not calls
        parts: list[Part] = []
        if mode.reasoning is not None:
            parts += [*mode.reasoning.before, *_text(reasoning)]
            parts += [] if is_cut_in_reasoning else mode.reasoning.after
        num_reasoning_parts = 0 if mode.reasoning is None else len(parts)
        if content or (not calls and not is_cut_in_reasoning):
            parts += [*mode.content.before, *_text(content)]
            parts += [] if finish == "length" else mode.content.after
        parts += self._call_parts(calls)
        ends = grammar.end.get(finish, ())
        parts += [Part(token=name) for name in ends]
        return Answer(
            prompt_ids=tuple(self._renderer.render_ids(record["messages"], record.get("tools") or ())),
            output_ids=tuple(self._encode(parts)),
            finish_reason=finish,
            content=content,
            reasoning=reasoning,
            tool_calls=calls,
            num_reasoning_tokens=self._num_reasoning_tokens(parts[:num_reasoning_parts]),
            is_reasoning_opened=mode.reasoning is not None and self._is_control_last(mode.reasoning.before),
            is_reasoning_closed=not is_cut_in_reasoning and self._is_control_before_content(),
            is_ended=bool(ends),
        )

    def _call_parts(self, calls: Sequence[ToolCall]) -> Iterator[Part]:
        tools = self._grammar.tools
        if not calls or tools is None:
            return
        yield from tools.before
        for number, call in enumerate(calls):
            if number > 0:
                yield from tools.between
            for part in tools.call:
                yield part if part.text is None else Part(text=_filled(part.text, call))
        yield from tools.after

    def _encode(self, parts: Iterable[Part]) -> Iterator[int]:
        pending = ""
        for part in parts:
            if part.token is None:
                # Neighbouring texts are one text to the model: a merge may cross the seam.
                pending += part.text or ""
                continue
            yield from self._tokenizer.encode_ordinary(pending)
            pending = ""
            yield self._tokenizer.control_id(part.token)
        yield from self._tokenizer.encode_ordinary(pending)

    def _num_reasoning_tokens(self, parts: Sequence[Part]) -> int:
        last = max((i for i, part in enumerate(parts) if part.token == self._mode.close), default=len(parts) - 1)
        return len(list(self._encode(parts[: last + 1])))

    def _is_control_last(self, before: Sequence[Part]) -> bool:
        if before:
            return before[-1].token is not None
        ending = self._mode.prompt_ends_with
        return any(ending.endswith(token.text) for token in self._grammar.control.values())

    def _is_control_before_content(self) -> bool:
        between = [*(self._mode.reasoning.after if self._mode.reasoning else ()), *self._mode.content.before]
        return self._is_control_last(between)


def _text(text: str | None) -> list[Part]:
    return [Part(text=text)] if text else []


def _filled(template: str, call: ToolCall) -> str:
    values = {"{id}": call.id, "{name}": call.name, "{arguments}": call.arguments}
    for placeholder, value in values.items():
        before, found, after = template.partition(placeholder)
        if found:
            # Values are not searched again: arguments may hold text that looks like a placeholder.
            rest = _filled(after, call)
            return _filled(before, call) + value + rest
    return template
