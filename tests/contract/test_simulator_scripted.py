"""Scripted answers as ids of real tokenizers: the reply's counts and texts follow from the ids, not the other way."""

import json
import shutil

import pytest

from eagle3.errors import InputError
from eagle3.records import Completion, Usage
from eagle3.records import ToolCall as RecordedCall
from eagle3.simulator.answers import cut_answer, load_answers, load_decode, recorded_answer
from eagle3.simulator.habits import render
from eagle3.simulator.scenario import Provider
from eagle3.simulator.scripted import Script
from eagle3.tokens.layout import Habits, billed_count, lay_out, shapes_of

VERBATIM = Provider.model_validate({"name": "P", "tag": "p", "prompt_usd_per_mtok": 1, "completion_usd_per_mtok": 1})
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}]


def line(**fields):
    return {
        "messages": [{"role": "user", "content": "hi"}],
        "reasoning": None,
        "content": None,
        "tool_calls": [],
        "finish_reason": "stop",
        **fields,
    }


@pytest.fixture(scope="module")
def kimi(shared_data) -> Script:
    return Script(shared_data / "kimi-k2.5", "kimi-k2.5", "thinking")


def ids_of(script: Script, text: str) -> tuple[int, ...]:
    return tuple(script._tokenizer.encode_ordinary(text))


def control(script: Script, *names: str) -> tuple[int, ...]:
    return tuple(script._tokenizer.control_id(name) for name in names)


def test_reasoning_and_content(kimi):
    answer = kimi.answer(line(reasoning="Short thought.", content=" Oi!"))
    expected = (
        ids_of(kimi, "Short thought.") + control(kimi, "think_close") + ids_of(kimi, " Oi!") + control(kimi, "end")
    )
    assert answer.output_ids == expected
    assert answer.num_reasoning_tokens == len(ids_of(kimi, "Short thought.")) + 1
    assert (answer.is_reasoning_opened, answer.is_reasoning_closed, answer.is_ended) == (True, True, True)
    assert answer.prompt_ids[-1:] == control(kimi, "think_open")
    assert render(answer, VERBATIM).completion_tokens == len(expected)


def test_tool_calls(kimi):
    calls = [
        {"id": "functions.get:0", "name": "get", "arguments": '{"a": "{id}"}'},
        {"id": "functions.get:1", "name": "get", "arguments": "{}"},
    ]
    answer = kimi.answer(line(reasoning="", tool_calls=calls, finish_reason="tool_calls", tools=TOOLS))
    expected = control(kimi, "think_close", "section_begin")
    for call in calls:
        expected += control(kimi, "call_begin") + ids_of(kimi, call["id"]) + control(kimi, "argument_begin")
        expected += ids_of(kimi, call["arguments"]) + control(kimi, "call_end")
    assert answer.output_ids == expected + control(kimi, "section_end", "end")
    assert answer.num_reasoning_tokens == 1


def test_a_cut_inside_reasoning_closes_nothing(kimi):
    answer = kimi.answer(line(reasoning="On and on", finish_reason="length"))
    assert answer.output_ids == ids_of(kimi, "On and on")
    assert answer.num_reasoning_tokens == len(answer.output_ids)
    assert not answer.is_reasoning_closed
    assert not answer.is_ended


def test_instant_mode_refuses_reasoning(shared_data):
    script = Script(shared_data / "kimi-k2.5", "kimi-k2.5", "instant")
    assert script.answer(line(content="42")).output_ids == ids_of(script, "42") + control(script, "end")
    with pytest.raises(ValueError, match="does not reason"):
        script.answer(line(reasoning="hm", content="42"))


def test_neighbouring_texts_merge_across_the_seam(shared_data, tmp_path):
    folder = tmp_path / "qwen3"
    shutil.copytree(shared_data / "tokenizers" / "qwen3", folder)
    script = Script(folder, "qwen3", "thinking")
    answer = script.answer(line(reasoning="\nhm", content="ok"))
    opened, closed = control(script, "think_open"), control(script, "think_close")
    expected = opened + ids_of(script, "\n\nhm\n") + closed + ids_of(script, "\n\nok") + control(script, "end")
    assert answer.output_ids == expected
    assert answer.num_reasoning_tokens == len(opened + ids_of(script, "\n\nhm\n") + closed)


def test_shipped_scripted_answers_load_for_a_reasoning_model(kimi, project):
    path = project / "examples" / "answers" / "scripted.jsonl"
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").split("\n") if text]
    answers = load_answers([path], script=kimi.answer)
    assert len(answers) == len(lines) >= 20


def test_a_line_the_grammar_cannot_say_is_named(shared_data, tmp_path):
    script = Script(shared_data / "tokenizers" / "smollm2", "smollm")
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(line(content="fine")) + "\n" + json.dumps(line(reasoning="hm", content="x")) + "\n")
    with pytest.raises(InputError, match="line 2"):
        load_answers([path], script=script.answer)


def as_completion(outcome) -> Completion:
    return Completion(
        sample_id="s", dataset="d", reasoning=outcome.reasoning, content=outcome.content,
        tool_calls=[RecordedCall(id=c.id, name=c.name, arguments=c.arguments) for c in outcome.tool_calls],
        finish_reason=outcome.finish_reason, native_finish_reason=outcome.finish_reason, provider="P", model="m",
        quantization=None, generation_id=None,
        usage=Usage(
            prompt_tokens=outcome.prompt_tokens, completion_tokens=outcome.completion_tokens,
            reasoning_tokens=outcome.reasoning_tokens, cached_tokens=0,
        ),
        cost_usd=outcome.cost_usd, cost_is_estimated=False, prompt_token_ids=None, completion_token_ids=None,
        latency_s=0.0, attempts=1, from_cache=False, raw_body=b"",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("provider", "habits"),
    [
        ({}, Habits()),
        ({"space_around_control_tokens": True}, Habits(head_space="strip", tail_space="strip_all")),
        ({"end_token_billed": False}, Habits(end_billed=False)),
    ],
)
def test_the_rebuilding_of_ids_undoes_each_habit(kimi, project, provider, habits):
    """Two independent ways meet: ids -> reply here, reply -> ids in eagle3.tokens."""
    path = project / "examples" / "answers" / "scripted.jsonl"
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").split("\n") if text]
    served = VERBATIM.model_copy(update=provider)
    for record in lines:
        answer = kimi.answer(record)
        outcome = render(answer, served)
        completion = as_completion(outcome)
        shape = shapes_of(completion, kimi._grammar, "thinking")[0]
        pieces = lay_out(completion, kimi._grammar, "thinking", habits, shape, kimi._tokenizer.encode_ordinary)
        assert tuple(i for piece in pieces for i in piece.ids) == answer.output_ids, record["id"]
        assert billed_count(pieces, kimi._grammar, "thinking", habits) == outcome.completion_tokens, record["id"]


def test_a_recorded_answer_is_cut_by_its_ids(shared_data, project):
    text = (project / "examples" / "answers" / "smollm2-135m-instruct.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.split("\n")[:40] if line]
    decode = load_decode(shared_data / "tokenizers" / "smollm2")
    for record in records:
        answer = recorded_answer(record)
        short = cut_answer(answer, 5, decode)
        assert len(short.output_ids) == min(5, len(answer.output_ids))
        assert record["text"].startswith(short.content.rstrip("\ufffd"))
