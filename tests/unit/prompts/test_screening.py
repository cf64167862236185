"""Each reason to drop a prompt, planted."""

from typing import Any

import pytest

from eagle3.prompts.reading import parse_conversation
from eagle3.prompts.screening import DropReason, literal_pattern, screen

LITERALS = literal_pattern({"<end>", "<end_of_turn>", "[EOS]"})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def reason(messages: list[dict[str, Any]], *, special=LITERALS, tools=()) -> DropReason | None:
    found = screen(parse_conversation({"messages": messages, "tools": list(tools)}, 1, "p"), special)
    return None if found is None else found[0]


SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Hello."}


@pytest.mark.parametrize(
    "messages",
    [
        [user("hi")],
        [SYSTEM, user("hi")],
        [user("hi"), ASSISTANT, user("more")],
        [user("hi"), ASSISTANT, {"role": "tool", "content": ""}],
        [user([{"type": "text", "text": "hi"}])],
        [user("less < than [EOT] <end")],
    ],
)
def test_usable_conversations_pass(messages):
    assert reason(messages) is None


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM], DropReason.WRONG_TURN),
        ([ASSISTANT, user("hi")], DropReason.WRONG_TURN),
        ([user("hi"), ASSISTANT], DropReason.WRONG_TURN),
        ([user("hi"), SYSTEM], DropReason.WRONG_TURN),
        ([user(" \n")], DropReason.NO_TEXT),
        ([user([])], DropReason.NO_TEXT),
        ([user([{"type": "image_url", "image_url": {}}, {"type": "text", "text": "what?"}])], DropReason.NO_TEXT),
        ([user("half \ud83d")], DropReason.BROKEN_TEXT),
        ([user("stop <end> here")], DropReason.SPECIAL_LITERAL),
        ([{"role": "system", "content": "x[EOS]"}, user("hi")], DropReason.SPECIAL_LITERAL),
        ([user([{"type": "text", "text": "<end>"}])], DropReason.SPECIAL_LITERAL),
    ],
)
def test_unusable_conversations_are_told_apart(messages, expected):
    assert reason(messages) is expected


def test_literals_hide_in_tool_calls_and_declarations_too():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "<end>"}'}}
    history = [user("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    assert reason(history) is DropReason.SPECIAL_LITERAL
    tools = [{"type": "function", "function": {"name": "f", "description": "<end>"}}]
    assert reason([user("hi")], tools=tools) is DropReason.SPECIAL_LITERAL


def test_literals_may_be_allowed():
    assert reason([user("stop <end> here")], special=None) is None
    assert literal_pattern([]) is None


def test_the_longest_literal_is_named():
    found = screen(parse_conversation({"messages": [user("<end_of_turn>")]}, 1, "p"), LITERALS)
    assert found is not None
    assert "'<end_of_turn>'" in found[1]
