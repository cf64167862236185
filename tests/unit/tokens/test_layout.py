"""Layout: the order of control tokens and texts for every kind of answer, and what habits take away."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import ReconstructionError
from eagle3.records import SegmentKind
from eagle3.tokens.layout import Close, Habits, Shape, billed_count, lay_out, respace, shapes_of
from eagle3.tokens.profiles import habits_of

CALLS = (("look", '{"city": "Rome"}'), ("add", "{}"))


@pytest.fixture
def read(family):
    """Lay an answer out and spell it: control tokens as <name>, texts in quotes."""

    def spell(completion, mode="thinking", habits=None, shape=None):
        pieces = lay_out(
            completion, family.grammar, mode, habits or Habits(), shape or Shape(), family.tokenizer.encode_ordinary
        )
        return " ".join(
            f"<{piece.token}>" if piece.token else f"{piece.kind.value}={family.tokenizer.decode(piece.ids)!r}"
            for piece in pieces
        )

    return spell


def test_answers_of_every_kind(read, completion):
    assert read(completion("Hi", reasoning="Hm")) == "reasoning='Hm' <think_close> content='Hi' <end>"
    assert read(completion("Hi")) == "<think_close> content='Hi' <end>"
    assert read(completion("Hi"), mode="plain") == "content='Hi' <end>"
    assert read(completion(reasoning="Hm", calls=CALLS, finish="tool_calls")) == (
        "reasoning='Hm' <think_close> <calls> tool='look' <arg> tool='{\"city\": \"Rome\"}\\nadd' <arg> tool='{}' "
        "<calls_end> <end>"
    )
    assert read(completion("Hi", reasoning="Hm", finish="length")) == "reasoning='Hm' <think_close> content='Hi'"


@pytest.mark.parametrize("empty", [None, ""])
def test_missing_and_empty_texts_are_the_same(read, completion, empty):
    assert read(completion(empty, reasoning="Hm")) == "reasoning='Hm' <think_close> <end>"
    assert read(completion("Hi", reasoning=empty)) == "<think_close> content='Hi' <end>"


def test_shapes(family, completion):
    def shapes(*args, mode="thinking", **kwargs):
        return shapes_of(completion(*args, **kwargs), family.grammar, mode)

    assert shapes("Hi", reasoning="Hm") == [Shape()]
    assert shapes("Hi", mode="plain") == [Shape()]
    assert shapes(reasoning="Hm", finish="length") == [Shape(close=Close.NONE), Shape()]
    assert shapes(reasoning="Hm", calls=CALLS) == [Shape(), Shape(close=Close.IMPLICIT)]
    assert shapes("Hm</think>Hi") == [Shape(), Shape(is_split=False)]


def test_cut_and_implicit_close(read, completion):
    cut = completion(reasoning="Hm", finish="length")
    assert read(cut, shape=Shape(close=Close.NONE)) == "reasoning='Hm'"
    assert read(cut) == "reasoning='Hm' <think_close>"
    calls = completion(reasoning="Hm", calls=CALLS[1:], finish="tool_calls")
    assert read(calls, shape=Shape(close=Close.IMPLICIT)).startswith("reasoning='Hm' <calls> tool='add'")


def test_raw_content_is_split_at_the_first_close_only(read, completion):
    raw = completion("Hm</think>Hi </think>!")
    assert read(raw) == "reasoning='Hm' <think_close> content='Hi </think>!' <end>"
    assert read(raw, shape=Shape(is_split=False)) == "<think_close> content='Hm</think>Hi </think>!' <end>"


def test_padding_is_put_back_only_where_it_was_stripped(read, completion):
    answer = completion("Hi", reasoning="Hm")
    restored = Habits(padding="restored")
    whole = "<think_open> reasoning='\\nHm' <think_close> content='\\n\\nHi' <end>"
    assert read(answer, "opening", restored) == whole
    assert read(completion("\n\nHi", reasoning="\nHm"), "opening") == whole
    assert read(completion("<think>\nHm</think>\n\nHi"), "opening", restored) == whole
    assert read(completion("Hi"), "opening", restored) == "content='Hi' <end>"


def test_exactly_one_space_is_taken_and_only_beside_control_tokens(read, completion):
    answer = completion("  Hi  ", reasoning="  Hm  ")
    assert read(answer, habits=Habits(head_space="strip")) == "reasoning=' Hm  ' <think_close> content=' Hi  ' <end>"
    assert read(answer, habits=Habits(tail_space="strip")) == "reasoning='  Hm ' <think_close> content='  Hi  ' <end>"
    assert read(answer, habits=Habits(tail_space="strip_all")).endswith("content='  Hi ' <end>")
    cut = completion("Hi ", reasoning="Hm", finish="length")
    assert read(cut, habits=Habits(tail_space="strip_all")).endswith("content='Hi '")
    tabs = completion("\tHi\n", reasoning="\u00a0Hm")
    both = Habits(head_space="strip", tail_space="strip_all")
    assert read(tabs, habits=both) == "reasoning='\\xa0Hm' <think_close> content='\\tHi\\n' <end>"


def test_content_before_tool_calls_is_beside_a_control_token(read, completion):
    answer = completion("Wait ", reasoning="Hm", calls=CALLS[1:], finish="tool_calls")
    assert "content='Wait' <calls>" in read(answer, habits=Habits(tail_space="strip"))


def test_tool_placeholders_are_filled_once(read, completion):
    answer = completion(reasoning="Hm", calls=(("{arguments}", '{"a": "{name}"}'),), finish="tool_calls")
    assert "tool='{arguments}' <arg> tool='{\"a\": \"{name}\"}'" in read(answer)


def test_what_the_grammar_has_no_place_for(family, read, completion):
    with pytest.raises(ReconstructionError, match="has reasoning"):
        read(completion("Hi", reasoning="Hm"), mode="plain")
    silent = family.grammar.model_copy(update={"tools": None})
    with pytest.raises(ReconstructionError, match="2 tool calls"):
        lay_out(completion(calls=CALLS), silent, "thinking", Habits(), Shape(), family.tokenizer.encode_ordinary)


def test_billed_count_follows_the_habits(family, completion):
    grammar, encode = family.grammar, family.tokenizer.encode_ordinary
    pieces = lay_out(completion("Hi", reasoning="Hm"), grammar, "thinking", Habits(), Shape(), encode)
    total = sum(len(piece.ids) for piece in pieces)
    assert billed_count(pieces, grammar, "thinking", Habits()) == total
    assert billed_count(pieces, grammar, "thinking", Habits(end_billed=False)) == total - 1
    assert billed_count(pieces, grammar, "thinking", Habits(end_billed=False, close_billed=False)) == total - 2
    cut = lay_out(completion("Hi", finish="length"), grammar, "plain", Habits(), Shape(), encode)
    assert billed_count(cut, grammar, "plain", Habits(end_billed=False)) == sum(len(piece.ids) for piece in cut)


def test_kinds(family, completion):
    pieces = lay_out(
        completion("Hi", reasoning="Hm", calls=CALLS),
        family.grammar,
        "thinking",
        Habits(),
        Shape(),
        family.tokenizer.encode_ordinary,
    )
    assert [piece.kind for piece in pieces][:3] == [SegmentKind.REASONING, SegmentKind.CONTROL, SegmentKind.CONTENT]
    assert pieces[-1].token == "end"


@pytest.mark.parametrize(
    ("arguments", "spaced", "compact"),
    [
        ('{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}', '{"a":1,"b":[1,2]}'),
        ('{ "a" : 1.0 }', '{"a": 1.0}', '{"a":1.0}'),
        (r'{"a":"x, y: \"z\" \\"}', r'{"a": "x, y: \"z\" \\"}', r'{"a":"x, y: \"z\" \\"}'),
        (r'{"a":"\u00e9","a":"é"}', r'{"a": "\u00e9", "a": "é"}', r'{"a":"\u00e9","a":"é"}'),
        ("{}", "{}", "{}"),
        ("{broken:  1", "{broken:  1", "{broken:  1"),
    ],
)
def test_respacing_touches_white_space_only(arguments, spaced, compact):
    assert respace(arguments, "spaced") == spaced
    assert respace(arguments, "compact") == compact
    assert respace(arguments, "verbatim") == arguments


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(value=JSON)
def test_respacing_agrees_with_the_json_library(value):
    for ascii_only in (True, False):
        spaced = json.dumps(value, ensure_ascii=ascii_only)
        compact = json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":"))
        assert respace(compact, "spaced") == spaced
        assert respace(spaced, "compact") == compact


RAW_CALL = '<|calls|> look<|arg|> {"a": 1} <|/calls|>'
SPACED = st.lists(st.sampled_from([" ", "Hm", "</think>", "\n", "", RAW_CALL]), max_size=4).map("".join)


@given(reasoning=SPACED, content=SPACED, has_call=st.booleans(), finish=st.sampled_from(["stop", "length"]))
def test_habits_of_equal_keys_lay_an_answer_out_alike(family, completion, reasoning, content, has_call, finish):
    calls = CALLS[:1] if has_call else ()
    answer = completion(content, reasoning=reasoning, calls=calls, finish=finish)
    known = {}
    for habits in habits_of(family.grammar, "thinking"):
        for shape in shapes_of(answer, family.grammar, "thinking"):
            pieces = lay_out(answer, family.grammar, "thinking", habits, shape, family.tokenizer.encode_ordinary)
            assert known.setdefault((habits.text_key(answer, shape), shape), pieces) == pieces
