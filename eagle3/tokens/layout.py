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
from eagle3.tokens.raw_tools import RawSection, find_raw_section

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

    def text_key(self, completion: Completion, shape: "Shape") -> tuple[object, ...]:
        """Return what of the habits shapes the ids of an answer: habits of equal keys lay it out alike."""
        return text_keys(completion, shape)(self)


def text_keys(completion: Completion, shape: "Shape") -> "Callable[[Habits], tuple[object, ...]]":
    """Return `Habits.text_key` for one answer, which is looked at only once."""
    texts = [text for text in (completion.reasoning, completion.content) if text]
    # Raw content may be split later, and then has a beginning and an end in its middle.
    is_raw = not completion.reasoning or shape.has_raw_tools
    head = is_raw or any(text.startswith(SPACE) for text in texts)
    tail = is_raw or any(text.endswith(SPACE) for text in texts)
    has_calls = bool(completion.tool_calls)

    def key(habits: Habits) -> tuple[object, ...]:
        return (
            habits.head_space if head else None,
            habits.tail_space if tail else None,
            habits.args_style if has_calls else None,
            habits.padding,
        )

    return key


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
    has_raw_tools: bool = False
    """Whether a tool section at the end of the content is control tokens; False takes it as ordinary text."""


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


class Edge(StrEnum):
    """Where a text of the reply touches a control token."""

    HEAD = "head"
    """After one."""
    TAIL = "tail"
    """Before one that is not the end of the answer."""
    END = "end"
    """Before the end of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    starts_after_token: bool
    ends_before_token: bool


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
    elements = _strip_spaces(elements, habits, _ends_of(completion, grammar, mode_name))
    pieces: list[Piece] = []
    for element in _merged(elements):
        if isinstance(element, str):
            pieces.append(Piece(kind=SegmentKind.CONTROL, ids=(grammar.control[element].id,), token=element))
        elif element.text:
            pieces.append(Piece(kind=element.kind, ids=tuple(encode(element.text))))
    pieces.extend(Piece(kind=SegmentKind.CONTROL, ids=(grammar.control[name].id,), token=name) for name in end)
    return pieces


def edges_of(completion: Completion, grammar: ResponseGrammar, mode_name: str) -> Iterator[tuple[Edge, str]]:
    """Yield each place at which a text of the reply, as received, touches a control token.

    Raises:
        ReconstructionError: As for `lay_out`.
    """
    ends = _ends_of(completion, grammar, mode_name)
    elements = _elements(completion, grammar, mode_name, Habits(), shapes_of(completion, grammar, mode_name)[0])
    for index, element in enumerate(elements):
        if not isinstance(element, str) and element.is_reply and element.text:
            touched = zip(Edge, _edges_at(elements, index, ends), strict=True)
            yield from ((edge, element.text) for edge, is_touched in touched if is_touched)


def shapes_of(
    completion: Completion, grammar: ResponseGrammar, mode_name: str, *, tools_declared: bool = False
) -> list[Shape]:
    """Return the shapes an answer can have, the usual one first.

    Args:
        completion: As returned by a provider.
        grammar: Of the target's family.
        mode_name: Mode in which the answer was asked for.
        tools_declared: Whether the request declared tools: then the server has taken tool sections out of the text, and
            what looks like one there is ordinary text.
    """
    shapes = _parsed_shapes(completion, grammar, mode_name)
    if tools_declared or _raw_section(completion, grammar) is None:
        return shapes
    raw = [replace(shape, has_raw_tools=True) for shape in shapes if shape.close is not Close.NONE]
    if completion.reasoning and grammar.tools is not None and grammar.tools.implicit_close:
        raw.append(Shape(close=Close.IMPLICIT, has_raw_tools=True))
    return [*raw, *shapes]


def _parsed_shapes(completion: Completion, grammar: ResponseGrammar, mode_name: str) -> list[Shape]:
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


def _raw_section(completion: Completion, grammar: ResponseGrammar) -> RawSection | None:
    if completion.tool_calls or not completion.content:
        return None
    return find_raw_section(completion.content, grammar, is_cut=completion.finish_reason not in grammar.end)


@dataclass(frozen=True, slots=True)
class Bill:
    """What of an answer may be on a bill; habits say what is."""

    num_ids: int
    num_closes: int
    has_end: bool

    @classmethod
    def of(cls, pieces: Sequence[Piece], grammar: ResponseGrammar, mode_name: str) -> "Bill":
        """Count what a layout holds."""
        close = grammar.mode(mode_name).close
        return cls(
            num_ids=sum([len(piece.ids) for piece in pieces]),
            num_closes=sum([piece.token is not None and piece.token == close for piece in pieces]),
            has_end=bool(pieces) and any(pieces[-1].token in names for names in grammar.end.values()),
        )

    def count(self, habits: Habits) -> int:
        """Return how many completion tokens a provider of these habits bills."""
        unbilled_closes = 0 if habits.close_billed else self.num_closes
        return self.num_ids - unbilled_closes - (self.has_end and not habits.end_billed)


def billed_count(pieces: Sequence[Piece], grammar: ResponseGrammar, mode_name: str, habits: Habits) -> int:
    """Return how many completion tokens a provider of these habits bills for these pieces."""
    return Bill.of(pieces, grammar, mode_name).count(habits)


def respace(arguments: str, style: ArgumentStyle) -> str:
    """Return JSON text with its white space outside of strings rewritten; everything else stays as it is.

    Numbers, escapes, key order and duplicate keys are not touched. Text that is no JSON is returned unchanged.
    """
    if style == "verbatim":
        return arguments
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
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
        section = find_raw_section(content, grammar, is_cut=True) if shape.has_raw_tools else None
        text = content if section is None else content[: section.start]
        if text or section is None:
            elements += _parts(mode.content.before, habits, SegmentKind.CONTROL)
            elements.append(_Text(SegmentKind.CONTENT, text, is_reply=True))
            elements += _parts(mode.content.after, habits, SegmentKind.CONTROL)
        for name, written in section.parts if section is not None else ():
            elements.append(name if name is not None else _Text(SegmentKind.TOOL, written, is_reply=True))
    if completion.tool_calls:
        if content and grammar.tools is not None:
            elements += _parts(grammar.tools.after_content, habits, SegmentKind.CONTENT)
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


def _strip_spaces(elements: Sequence[_Element], habits: Habits, ends: _Ends) -> list[_Element]:
    """Take away the one space that the provider's detokenizer put beside each control token.

    A cut answer ends without a control token, so a space at its end is the model's own.
    """
    result: list[_Element] = []
    for index, element in enumerate(elements):
        if isinstance(element, str) or not element.is_reply:
            result.append(element)
            continue
        text = element.text
        is_head, is_tail, is_end = _edges_at(elements, index, ends)
        if is_head and habits.head_space == "strip":
            text = text.removeprefix(SPACE)
        if (is_tail and habits.tail_space != "keep") or (is_end and habits.tail_space == "strip_all"):
            text = text.removesuffix(SPACE)
        result.append(element if text is element.text else _Text(element.kind, text, is_reply=True))
    return result


def _edges_at(elements: Sequence[_Element], index: int, ends: _Ends) -> tuple[bool, bool, bool]:
    """Return which edges a text has, in the order of `Edge`."""
    is_last = index + 1 == len(elements)
    is_after_token = isinstance(elements[index - 1], str) if index else ends.starts_after_token
    is_before_token = not is_last and isinstance(elements[index + 1], str)
    return is_after_token, is_before_token, is_last and ends.ends_before_token


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


def _ends_of(completion: Completion, grammar: ResponseGrammar, mode_name: str) -> _Ends:
    ending = grammar.mode(mode_name).prompt_ends_with
    return _Ends(
        starts_after_token=ending.endswith(tuple([token.text for token in grammar.control.values()])),
        ends_before_token=bool(grammar.end.get(completion.finish_reason, ())),
    )
