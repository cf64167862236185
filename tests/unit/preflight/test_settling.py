"""What known answers leave of a provider's habits: the truth is always left, and more is told than counts tell."""

from dataclasses import replace
from itertools import chain

import pytest

from eagle3.preflight.settling import Probed, settled_axes, shortest_length, surviving
from eagle3.records import ToolCall
from eagle3.tokens.layout import Close, Habits, Shape, billed_count, lay_out
from tests.unit.conftest import TOOL


def answer(run, habits: Habits, text: str, max_tokens: int = 500, *, name: str = "", repeats=None, call=False):
    """What a provider of these habits replies when the model thinks, then writes `text`, or calls a tool."""
    grammar, tokenizer, mode = run.renderer.grammar, run.renderer.tokenizer, run.renderer.mode
    calls = [ToolCall(id="look_up:0", name="look_up", arguments='{"a": 7}')] if call else []
    prompt = run.prompt(text, tools=[TOOL] if call else [])
    true = run.completion(prompt, reasoning="So.", content=None if call else text, calls=calls)
    pieces = lay_out(true, grammar, mode, Habits(), Shape(close=Close.TOKEN), tokenizer.encode_ordinary)
    ids = list(chain.from_iterable(piece.ids for piece in pieces))
    is_cut = len(ids) > max_tokens
    billed = max_tokens - (not habits.close_billed) if is_cut else billed_count(pieces, grammar, mode, habits)
    before, after = (" " if habits.head_space == "strip" else ""), (" " if habits.tail_space != "keep" else "")
    end = " " if habits.tail_space == "strip_all" and not is_cut else ""
    content = None if call else f"{before}{text}{end}"
    if is_cut and content is not None:
        content = before + text[: max_tokens - len("So.") - 1]
    shown = replace(
        true,
        reasoning=f"{before}So.{after}",
        content=content,
        tool_calls=[replace(each, arguments='{"a":7}') for each in calls] if habits.args_style == "spaced" else calls,
        finish_reason="length" if is_cut else true.finish_reason,
        usage=true.usage._replace(completion_tokens=billed),
    )
    return Probed(name=name or text, max_tokens=max_tokens, completion=shown, repeats=repeats)


TRUTHS = [
    Habits(),
    Habits(head_space="strip", tail_space="strip_all"),
    Habits(end_billed=False),
    Habits(head_space="strip", tail_space="strip_all", end_billed=False),
    Habits(end_billed=False, close_billed=False, args_style="spaced"),
    Habits(head_space="strip", tail_space="strip", args_style="spaced"),
]


@pytest.mark.parametrize("truth", TRUTHS, ids=str)
def test_the_truth_is_settled(tiny_run, truth):
    grammar, tokenizer, mode = tiny_run.renderer.grammar, tiny_run.renderer.tokenizer, tiny_run.renderer.mode
    probed = [answer(tiny_run, truth, "42"), answer(tiny_run, truth, "2024"), answer(tiny_run, truth, "x", call=True)]
    for whole in probed[:2]:
        shortest = shortest_length(whole.completion, grammar, tokenizer, mode)
        assert shortest is not None
        for limit in (shortest, shortest - 1):
            again = answer(tiny_run, truth, whole.name, limit, name=f"{whole.name} in {limit}", repeats=whole.name)
            probed.append(again)
    left = surviving(probed, grammar, tokenizer, mode)
    settled = settled_axes(left, grammar, mode)
    for axis in ("head_space", "tail_space", "end_billed", "close_billed"):
        assert settled[axis] == [getattr(truth, axis)], axis
    if truth.args_style == "spaced":
        assert settled["args_style"] == ["spaced"]


def test_without_the_cut_answer_spaces_and_unbilled_tokens_look_alike(tiny_run):
    grammar, tokenizer, mode = tiny_run.renderer.grammar, tiny_run.renderer.tokenizer, tiny_run.renderer.mode
    spaced = Habits(head_space="strip", tail_space="strip_all")
    probed = [answer(tiny_run, spaced, "42"), answer(tiny_run, spaced, "2024")]
    assert "end_billed" not in settled_axes(surviving(probed, grammar, tokenizer, mode), grammar, mode)


def test_an_answer_that_nothing_explains_tells_nothing(tiny_run):
    grammar, tokenizer, mode = tiny_run.renderer.grammar, tiny_run.renderer.tokenizer, tiny_run.renderer.mode
    odd = answer(tiny_run, Habits(), "42")
    usage = odd.completion.usage._replace(completion_tokens=400)
    odd = replace(odd, name="odd", completion=replace(odd.completion, usage=usage))
    probed = [answer(tiny_run, Habits(), "42"), odd]
    assert Habits() in surviving(probed, grammar, tokenizer, mode)


def test_nothing_is_settled_when_answers_contradict_one_another(tiny_run):
    grammar, tokenizer, mode = tiny_run.renderer.grammar, tiny_run.renderer.tokenizer, tiny_run.renderer.mode
    probed = [
        answer(tiny_run, Habits(), "42", name="a"),
        answer(tiny_run, Habits(), "43", name="b"),
        answer(tiny_run, Habits(end_billed=False, close_billed=False), "44", name="c"),
    ]
    assert settled_axes(surviving(probed, grammar, tokenizer, mode), grammar, mode) == {}
