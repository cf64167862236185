"""Which well-formed conversations may be asked: pure rules, no files.

Each rule looks at one conversation and returns why it must not be asked, or None. Nothing here costs money, and all
of it happens before money is spent.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from eagle3.prompts.reading import Conversation
from eagle3.records import strings_of

_SURROGATE = re.compile("[\ud800-\udfff]")


class DropReason(StrEnum):
    """Why a conversation is not asked."""

    DUPLICATE = "duplicate"
    WRONG_TURN = "wrong_turn"
    """The first turn is not the user's, or the last one leaves nothing to answer."""
    NO_TEXT = "no_text"
    """The turn to answer is empty, or a message has parts that are no text."""
    BROKEN_TEXT = "broken_text"
    """A string holds half of a surrogate pair, which no server can have received as such."""
    SPECIAL_LITERAL = "special_literal"
    """A string holds the text of a control token. Servers read it as the token, so the conversation that the model saw
    would not be the one we know."""
    TEMPLATE = "template"
    """The target's chat template refuses the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A conversation that is not asked: a counted record, not a log line."""

    dataset: str
    line: int
    prompt_id: str
    reason: DropReason
    detail: str


def literal_pattern(literals: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds any of the literals, longest first; None when there are none."""
    ordered = sorted(literals, key=lambda literal: (-len(literal), literal))
    return re.compile("|".join(re.escape(literal) for literal in ordered)) if ordered else None


def screen(conversation: Conversation, special: re.Pattern[str] | None) -> tuple[DropReason, str] | None:
    """Say why a conversation must not be asked, with a detail for people; None when it may.

    Args:
        conversation: Of the right shape.
        special: Control-token texts that must not occur, from `literal_pattern`; None to allow all.
    """
    return (
        _turns(conversation)
        or _text_parts(conversation)
        or _broken_text(conversation)
        or (_special_literal(conversation, special) if special else None)
    )


def _turns(conversation: Conversation) -> tuple[DropReason, str] | None:
    roles = [message["role"] for message in conversation.messages]
    spoken = [role for role in roles if role not in ("system", "developer")]
    if not spoken or spoken[0] != "user":
        found = spoken[0] if spoken else "none"
        return DropReason.WRONG_TURN, f"the first turn after the system message must be 'user', found {found!r}"
    if roles[-1] not in ("user", "tool"):
        return DropReason.WRONG_TURN, f"the last turn must be 'user' or 'tool', found {roles[-1]!r}"
    return None


def _text_parts(conversation: Conversation) -> tuple[DropReason, str] | None:
    for index, message in enumerate(conversation.messages):
        content = message.get("content")
        if isinstance(content, list):
            kinds = {str(part["type"]) for part in cast("list[Mapping[str, object]]", content)} - {"text"}
            if kinds:
                return DropReason.NO_TEXT, f"messages[{index}] has parts of type {sorted(kinds)[:5]}"
    last = conversation.messages[-1]
    if last["role"] == "user" and not _text_of(last.get("content")).strip():
        return DropReason.NO_TEXT, "the last message is empty"
    return None


def _broken_text(conversation: Conversation) -> tuple[DropReason, str] | None:
    for text in strings_of([list(conversation.messages), list(conversation.tools)]):
        if _SURROGATE.search(text):
            return DropReason.BROKEN_TEXT, "a string holds half of a surrogate pair"
    return None


def _special_literal(conversation: Conversation, special: re.Pattern[str]) -> tuple[DropReason, str] | None:
    for text in strings_of([list(conversation.messages), list(conversation.tools)]):
        found = special.search(text)
        if found:
            return DropReason.SPECIAL_LITERAL, f"the text {found.group()!r} is a control token of the target"
    return None


def _text_of(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part["text"]) for part in cast("list[Mapping[str, object]]", content))
    return content if isinstance(content, str) else ""
