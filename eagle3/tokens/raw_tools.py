"""Tool sections that a server left inside the answer text, found by the grammar's own shape.

When a request declares no tools, servers do not parse calls: the model's section comes as text, its control tokens as
their literals. Such literals are control tokens only where the whole section is well-formed: opener, calls with a name
or id and a JSON object each, closer, end of text. Anything else stays ordinary text. An answer cut by its length may
end inside a section; then the part before the cut must be well-formed.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle3.tokens.grammar import Part, ResponseGrammar, ToolGrammar

_ARGUMENTS = "{arguments}"
_VALUES = {"{id}": r"\s?[\w.:\-]+\s?", "{name}": r"\s?[\w.\-]+\s?", _ARGUMENTS: _ARGUMENTS}
"""What stands in the pattern of a call for each placeholder; arguments are read as JSON, which is no pattern."""


@dataclass(frozen=True, slots=True)
class RawSection:
    """A tool section inside a text."""

    start: int
    """Where it starts; the text before it is the answer's own."""
    parts: tuple[tuple[str | None, str], ...]
    """In order: (name of a control token, its literal), or (None, text as the model wrote it)."""


def find_raw_section(text: str, grammar: ResponseGrammar, *, is_cut: bool) -> RawSection | None:
    """Return the tool section at the end of a text; None when there is no well-formed one.

    Args:
        text: Answer text as received.
        grammar: Of the target's family.
        is_cut: Whether the answer ended by its length, so that the section may be incomplete.
    """
    tools = grammar.tools
    if tools is None:
        return None
    opener = next((part.token for part in (*tools.before, *tools.call) if part.token is not None), None)
    if opener is None:
        return None
    start = text.find(grammar.control[opener].text)
    if start < 0:
        return None
    section = text[start:]
    is_whole = _is_whole(section, tools, grammar)
    if not is_whole and not (is_cut and _is_beginning(section, tools, grammar)):
        return None
    return RawSection(start, tuple(_parts(section, tools, grammar)))


def _is_whole(section: str, tools: ToolGrammar, grammar: ResponseGrammar) -> bool:
    before, between = (re.compile(_pattern(parts, grammar)) for parts in (tools.before, tools.between))
    after = re.compile(_pattern(tools.after, grammar) + r"\s?\Z")
    ahead, _, behind = _pattern(tools.call, grammar).partition(_ARGUMENTS)
    opened = before.match(section)
    position = opened.end() if opened is not None else None
    while position is not None:
        position = _call_end(re.compile(ahead), re.compile(behind), section, position)
        if position is None:
            return False
        if after.match(section, position) is not None:
            return True
        gap = between.match(section, position)
        position = gap.end() if gap is not None else None
    return False


def _call_end(ahead: re.Pattern[str], behind: re.Pattern[str], section: str, position: int) -> int | None:
    """Return the end of the call that starts at a position, when its arguments are a JSON object."""
    opened = ahead.match(section, position)
    if opened is None:
        return None
    start = opened.end()
    start += len(section[start:]) - len(section[start:].lstrip())
    try:
        arguments, stop = json.JSONDecoder().raw_decode(section, start)
    except (ValueError, RecursionError):
        return None
    closed = behind.match(section, stop)
    return closed.end() if isinstance(arguments, dict) and closed is not None else None


def _is_beginning(section: str, tools: ToolGrammar, grammar: ResponseGrammar) -> bool:
    """Tell whether control tokens come in the order of a section, as far as it goes."""
    calls = _names(tools.call)
    expected = [*_names(tools.before), *calls]
    order = [name for name, _ in _parts(section, tools, grammar) if name is not None]
    for position, name in enumerate(order):
        if expected[position] != name:
            return False
        if position + 1 == len(expected):
            expected += calls
    return bool(order)


def _names(parts: Sequence[Part]) -> list[str]:
    return [part.token for part in parts if part.token is not None]


def _pattern(parts: Sequence[Part], grammar: ResponseGrammar) -> str:
    pattern = ""
    for part in parts:
        if part.token is not None:
            # Slow detokenizers put a space on either side; it stays with the neighbouring text.
            pattern += r"\s?" + re.escape(grammar.control[part.token].text)
        else:
            pieces = re.split(r"(\{id\}|\{name\}|\{arguments\})", part.text or "")
            pattern += "".join(_VALUES.get(piece, re.escape(piece)) for piece in pieces)
    return pattern


def _parts(section: str, tools: ToolGrammar, grammar: ResponseGrammar) -> Iterator[tuple[str | None, str]]:
    names = dict.fromkeys([*_names(tools.before), *_names(tools.call), *_names(tools.between), *_names(tools.after)])
    literals = {grammar.control[name].text: name for name in names}
    for piece in re.split("(" + "|".join(re.escape(literal) for literal in literals) + ")", section):
        if piece:
            yield literals.get(piece), piece
