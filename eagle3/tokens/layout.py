"""How one answer lies in tokens: control tokens and texts in the order in which the model wrote them.

An answer reaches us as fields (reasoning, content, tool calls). Given a provider's `Habits` and the answer's `Shape`,
`lay_out` puts the model's own sequence back together. Each text between two control tokens is encoded by itself, so no
merge crosses a control token, as in the model.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from eagle3.errors import ReconstructionError
from eagle3.records import Completion, SegmentKind, ToolCall
from eagle3.tokens.grammar import (
    ArgumentStyle,
    Mode,
    PaddingStyle,
    Part,
    ResponseGrammar,
    SpaceAfter,
    SpaceBefore,
    ToolGrammar,
)

SPACE = " "
"""U+0020, the only character a detokenizer adds. Nothing else is ever stripped, and never more than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a provider does to an answer between the model and the client. Fields are the axes of `Variants`."""

    head_space: SpaceAfter = "keep"
    tail_space: SpaceBefore = "keep"
    args_style: ArgumentStyle = "verbatim"
    padding: PaddingStyle = "kept"
    end_billed: bool = True
    close_billed: bool = True

    def text_key(self, completion: Completion) -> tuple[object, ...]:
        """Return what of the habits shapes the ids of an answer: habits of equal keys lay it out alike."""
        texts = [text for text in (completion.reasoning, completion.content) if text]
        # Raw content may be split later, and then has a beginning and an end in its middle.
        is_raw = not completion.reasoning
        return (
            self.head_space if is_raw or any(text.startswith(SPACE) for text in texts) else None,
            self.tail_space if is_raw or any(text.endswith(SPACE) for text in texts) else None,
            self.args_style if completion.tool_calls else None,
            self.padding,
        )


class Close(StrEnum):
    """How the reasoning ended."""

    TOKEN = "token"
    """By the close token."""
    IMPLICIT = "implicit"
    """By a tool section, without the close token; parsers accept it and the text looks the same."""
    NONE = "none"
    """Not at all: the answer was cut inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the fields of a reply leave open about the order of tokens."""

    close: Close = Close.TOKEN
    is_split: bool = True
    """Whether a close literal inside raw content is the close token; False takes it as ordinary text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One control token, or the ids of one text."""

    kind: SegmentKind
    ids: tuple[int, ...]
    token: str | None = None
    """Name of the control token; None for text."""


@dataclass(frozen=True, slots=True)
class _Text:
    kind: SegmentKind
    text: str
    is_reply: bool
    """Whether it came with the reply, so that the provider's space habits apply."""


_Element = str | _Text
"""Name of a control token, or text."""

Encode = Callable[[str], Sequence[int]]


def lay_out(
    completion: Completion, grammar: ResponseGrammar, mode_name: str, habits: Habits, shape: Shape, encode: Encode
) -> list[Piece]:
    """Return the token sequence of an answer.

    Args:
        completion: As returned by a provider; texts untouched.
        grammar: Of the target's family.
        mode_name: Mode in which the answer was asked for.
        habits: What this provider does to the text.
        shape: What the fields leave open; see `shapes_of`.
        encode: Ordinary text to ids.

    Returns:
        Pieces without empty texts, the end token last when the finish reason has one.

    Raises:
        ReconstructionError: The reply holds something the grammar has no place for.
    """
    elements = _elements(completion, grammar, mode_name, habits, shape)
    end = grammar.end.get(completion.finish_reason, ())
    elements = _strip_spaces(
        elements, habits, starts_after_token=_prompt_ends_with_token(grammar, mode_name), ends_before_token=bool(end)
    )
    pieces: list[Piece] = []
    for element in _merged(elements):
        if isinstance(element, str):
            pieces.append(Piece(kind=SegmentKind.CONTROL, ids=(grammar.control[element].id,), token=element))
        elif element.text:
            pieces.append(Piece(kind=element.kind, ids=tuple(encode(element.text))))
    pieces.extend(Piece(kind=SegmentKind.CONTROL, ids=(grammar.control[name].id,), token=name) for name in end)
    return pieces


def shapes_of(completion: Completion, grammar: ResponseGrammar, mode_name: str) -> list[Shape]:
    """Return the shapes an answer can have, the usual one first."""
    mode = grammar.mode(mode_name)
    if mode.reasoning is None or mode.close is None:
        return [Shape()]
    reasoning, content = completion.reasoning or "", completion.content or ""
    close_text = grammar.control[mode.close].text
    if not reasoning and close_text in content:
        return [Shape(), Shape(is_split=False)]
    if completion.finish_reason not in grammar.end and not content.strip() and not completion.tool_calls:
        return [Shape(close=Close.NONE), Shape()]
    if completion.tool_calls and not content and grammar.tools is not None and grammar.tools.implicit_close:
        return [Shape(), Shape(close=Close.IMPLICIT)]
    return [Shape()]


def billed_count(pieces: Sequence[Piece], grammar: ResponseGrammar, mode_name: str, habits: Habits) -> int:
    """Return how many completion tokens a provider of these habits bills for these pieces."""
    close = grammar.mode(mode_name).close
    end_tokens = {name for names in grammar.end.values() for name in names}
    total = sum(len(piece.ids) for piece in pieces)
    if not habits.close_billed:
        total -= sum(1 for piece in pieces if piece.token is not None and piece.token == close)
    if not habits.end_billed and pieces and pieces[-1].token in end_tokens:
        total -= 1
    return total


def respace(arguments: str, style: ArgumentStyle) -> str:
    """Return JSON text with its white space outside of strings rewritten; everything else stays as it is.

    Numbers, escapes, key order and duplicate keys are not touched. Text that is no JSON is returned unchanged.
    """
    if style == "verbatim":
        return arguments
    try:
        json.loads(arguments)
    except ValueError:
        return arguments
    gap = SPACE if style == "spaced" else ""
    result: list[str] = []
    in_string = is_escaped = False
    for character in arguments:
        if in_string:
            result.append(character)
            in_string = is_escaped or character != '"'
            is_escaped = not is_escaped and character == "\\"
        elif character == '"':
            in_string = True
            result.append(character)
        elif character in ",:":
            result.append(character + gap)
        elif not character.isspace():
            result.append(character)
    return "".join(result)


def _elements(
    completion: Completion, grammar: ResponseGrammar, mode_name: str, habits: Habits, shape: Shape
) -> list[_Element]:
    mode = grammar.mode(mode_name)
    reasoning, content = completion.reasoning or "", completion.content or ""
    elements: list[_Element] = []
    if mode.reasoning is None and reasoning:
        raise ReconstructionError(
            f"sample {completion.sample_id!r} has reasoning, but mode {mode_name!r} of grammar {grammar.name!r} has no "
            "place for it. Check target.mode and whether the provider honours it."
        )
    if mode.reasoning is not None:
        if not reasoning and shape.is_split:
            reasoning, content = _split_raw(content, grammar, mode)
            if reasoning:
                habits = replace(habits, padding="kept")
        # A model that opens its reasoning itself may as well leave it out; one whose prompt opens it must close it.
        if reasoning or not mode.reasoning.before:
            elements += _parts(mode.reasoning.before, habits, SegmentKind.CONTROL)
            elements.append(_Text(SegmentKind.REASONING, reasoning, is_reply=True))
            if shape.close is Close.TOKEN:
                elements += _parts(mode.reasoning.after, habits, SegmentKind.CONTROL)
    if content and shape.close is not Close.NONE:
        elements += _parts(mode.content.before, habits, SegmentKind.CONTROL)
        elements.append(_Text(SegmentKind.CONTENT, content, is_reply=True))
        elements += _parts(mode.content.after, habits, SegmentKind.CONTROL)
    if completion.tool_calls:
        if grammar.tools is None:
            raise ReconstructionError(
                f"sample {completion.sample_id!r} has {len(completion.tool_calls)} tool calls, but grammar "
                f"{grammar.name!r} does not say how this model writes them. Add a 'tools' section to it."
            )
        elements += _tool_elements(completion.tool_calls, grammar.tools, habits)
    return elements


def _split_raw(content: str, grammar: ResponseGrammar, mode: Mode) -> tuple[str, str]:
    """Split content of a server that does not parse reasoning at the first close; later ones are ordinary text."""
    if mode.close is None or mode.reasoning is None:
        return "", content
    reasoning, close, rest = content.partition(grammar.control[mode.close].text)
    if not close:
        return "", content
    for part in mode.reasoning.before:
        opener = grammar.control[part.token].text if part.token is not None else ""
        reasoning = reasoning.removeprefix(opener)
    return reasoning, rest


def _tool_elements(calls: Sequence[ToolCall], tools: ToolGrammar, habits: Habits) -> Iterator[_Element]:
    yield from _parts(tools.before, habits, SegmentKind.TOOL)
    for index, call in enumerate(calls):
        if index:
            yield from _parts(tools.between, habits, SegmentKind.TOOL)
        for part in tools.call:
            if part.token is not None:
                yield part.token
            else:
                yield _Text(SegmentKind.TOOL, _filled(part.text or "", call, habits), is_reply=False)
    yield from _parts(tools.after, habits, SegmentKind.TOOL)


def _filled(template: str, call: ToolCall, habits: Habits) -> str:
    """Fill the placeholders of a tool text; a filled value is not looked at again."""
    values = {"{id}": call.id, "{name}": call.name, "{arguments}": respace(call.arguments, habits.args_style)}
    result, rest = "", template
    while rest:
        found = min((rest.find(key), key) for key in values if key in rest) if any(k in rest for k in values) else None
        if found is None:
            return result + rest
        result += rest[: found[0]] + values[found[1]]
        rest = rest[found[0] + len(found[1]) :]
    return result


def _parts(parts: Sequence[Part], habits: Habits, kind: SegmentKind) -> Iterator[_Element]:
    for part in parts:
        if part.token is not None:
            yield part.token
        elif not part.padding or habits.padding == "restored":
            yield _Text(kind, part.text or "", is_reply=False)


def _strip_spaces(
    elements: Sequence[_Element], habits: Habits, *, starts_after_token: bool, ends_before_token: bool
) -> list[_Element]:
    """Take away the one space that the provider's detokenizer put beside each control token.

    A cut answer ends without a control token, so a space at its end is the model's own.
    """
    result: list[_Element] = []
    for index, element in enumerate(elements):
        if isinstance(element, str) or not element.is_reply:
            result.append(element)
            continue
        text = element.text
        is_after_token = isinstance(elements[index - 1], str) if index else starts_after_token
        is_last = index + 1 == len(elements)
        is_before_token = not is_last and isinstance(elements[index + 1], str)
        is_before_end = is_last and ends_before_token
        if habits.head_space == "strip" and is_after_token:
            text = text.removeprefix(SPACE)
        if (habits.tail_space != "keep" and is_before_token) or (habits.tail_space == "strip_all" and is_before_end):
            text = text.removesuffix(SPACE)
        result.append(replace(element, text=text))
    return result


def _merged(elements: Sequence[_Element]) -> Iterator[_Element]:
    """Join neighbouring texts, which the model wrote as one; the reply's own text gives the kind."""
    pending: _Text | None = None
    for element in elements:
        if isinstance(element, str):
            if pending is not None:
                yield pending
                pending = None
            yield element
        elif pending is None:
            pending = element
        elif element.text:
            keeps_kind = pending.is_reply and bool(pending.text)
            kind = pending.kind if keeps_kind or not element.is_reply else element.kind
            is_reply = pending.is_reply or element.is_reply
            pending = _Text(kind, pending.text + element.text, is_reply=is_reply)
    if pending is not None:
        yield pending


def _prompt_ends_with_token(grammar: ResponseGrammar, mode_name: str) -> bool:
    ending = grammar.mode(mode_name).prompt_ends_with
    return any(ending.endswith(token.text) for token in grammar.control.values())
