"""Answers that are brought along, and stages that are opened again."""

import asyncio
import json

import pytest

from eagle3.artifacts import MANIFEST_NAME, RunDirectory, Stage
from eagle3.errors import InputError
from eagle3.formats import prompt_to_json, write_json_lines
from eagle3.generation import import_answers, reopen
from eagle3.generation.history import History, replay
from eagle3.generation.journal import Journal
from eagle3.generation.shards import completion_from_entry
from eagle3.records import IMPORTED_PROVIDER, FailureClass, PromptRecord
from tests.unit.generation.test_stage import prompts_of, recipe_of

PROMPTS = prompts_of(6)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    stage = run.open_stage(Stage.PROMPTS, {}, {})
    rows = [prompt_to_json(record) for record in PROMPTS]
    shard = stage.commit_shard("d/shard-00000.jsonl", lambda path: write_json_lines(path, rows), num_samples=len(rows))
    stage.seal([shard], {})
    return run


def history_of(run: RunDirectory) -> History:
    return replay(run.stage_path(Stage.COMPLETIONS), ["d"], recipe_of(run.path).generation.budget_usd)[0]


def completion_of(history: History, prompt: PromptRecord):
    place = history.sample(prompt.sample_id).answer
    assert place is not None
    return completion_from_entry("d", place.read(), {})


def user(prompt: PromptRecord) -> list[dict[str, object]]:
    return [dict(message) for message in prompt.messages]


CALL = {"id": "functions.a:0", "type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}}
FORMS = {
    "by id": lambda prompt: {"id": prompt.prompt_id, "message": {"content": " yes", "reasoning": " r"}},
    "by messages": lambda prompt: {"messages": user(prompt), "content": " yes", "reasoning": " r"},
    "as the last message": lambda prompt: {
        "messages": [*user(prompt), {"role": "assistant", "content": " yes", "reasoning_content": " r"}]
    },
    "as a whole response": lambda prompt: {
        "request": {"messages": user(prompt)},
        "response": {"choices": [{"message": {"content": " yes", "reasoning": " r"}, "finish_reason": "stop"}]},
    },
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_a_line_is_taken_once_and_untouched(run, tmp_path, form):
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 9}}
    line = form(PROMPTS[0])
    line |= usage if "response" not in line else {"response": {**line["response"], **usage}}
    write_json_lines(tmp_path / "a.jsonl", [line, line])
    first = import_answers(recipe_of(tmp_path), run, "d", tmp_path / "a.jsonl")
    assert (first.imported, first.completion_tokens, dict(first.skipped)) == (1, 9, {"answered already": 1})
    again = import_answers(recipe_of(tmp_path), run, "d", tmp_path / "a.jsonl")
    assert (again.imported, dict(again.skipped)) == (0, {"answered already": 2})
    history = history_of(run)
    completion = completion_of(history, PROMPTS[0])
    assert (completion.reasoning, completion.content) == (" r", " yes")
    assert (completion.provider, completion.model) == (IMPORTED_PROVIDER, "m/m")
    assert completion.cost_usd == 0
    assert history.tally("d").completion_tokens == 9
    assert history.sample(PROMPTS[0].sample_id).is_final


def test_ids_and_tool_calls_come_along(run, tmp_path):
    lines = [
        {"id": "1", "content": "x", "output_ids": [5, 6, 7], "prompt_token_ids": [1, 2], "model": "own"},
        {"id": "2", "message": {"content": None, "tool_calls": [CALL]}},
    ]
    write_json_lines(tmp_path / "a.jsonl", lines)
    assert import_answers(recipe_of(tmp_path), run, "d", tmp_path / "a.jsonl").imported == 2
    with_ids = completion_of(history_of(run), PROMPTS[1])
    assert (with_ids.prompt_token_ids, with_ids.completion_token_ids, with_ids.model) == ((1, 2), (5, 6, 7), "own")
    assert with_ids.usage.completion_tokens == 3
    called = completion_of(history_of(run), PROMPTS[2])
    assert called.finish_reason == "tool_calls"
    assert called.tool_calls[0].arguments == '{"x": 1}'


def test_lines_that_are_no_answers_are_counted_with_their_reasons(run, tmp_path):
    lines = [
        json.dumps({"id": "nobody", "content": "x"}),
        json.dumps({"id": "0", "content": ""}),
        json.dumps({"id": "0", "content": "half", "finish_reason": "network_error"}),
        "no json",
        json.dumps({"id": "0", "content": "good"}),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    result = import_answers(recipe_of(tmp_path), run, "d", tmp_path / "a.jsonl")
    assert result.imported == 1
    assert dict(result.skipped) == {"no prompt of the dataset": 1, "no answer": 2, "no JSON object": 1}
    assert len(result.examples) == 4
    with pytest.raises(InputError, match="no dataset"):
        import_answers(recipe_of(tmp_path), run, "other", tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        import_answers(recipe_of(tmp_path), run, "d", tmp_path / "missing.jsonl")


def fail(run: RunDirectory, prompt: PromptRecord, failure: FailureClass) -> None:
    async def write() -> None:
        journal = Journal(run.stage_path(Stage.COMPLETIONS))
        await journal.append(
            "d", {"kind": "failed", "id": prompt.sample_id, "failure": failure.value, "message": "m", "attempts": 3}
        )
        await journal.aclose()

    run.stage_path(Stage.COMPLETIONS).mkdir(parents=True, exist_ok=True)
    asyncio.run(write())


def test_chosen_failures_are_open_again_and_others_are_not(run, tmp_path):
    fail(run, PROMPTS[0], FailureClass.REJECTED)
    fail(run, PROMPTS[1], FailureClass.EMPTY)
    manifest = run.stage_path(Stage.COMPLETIONS) / MANIFEST_NAME
    manifest.write_text("{}", encoding="utf-8")
    opened = reopen(recipe_of(tmp_path), run, [FailureClass.REJECTED])
    assert dict(opened) == {FailureClass.REJECTED: 1}
    assert not manifest.exists()
    history = history_of(run)
    assert not history.sample(PROMPTS[0].sample_id).is_final
    assert history.sample(PROMPTS[0].sample_id).attempts == 0
    assert history.sample(PROMPTS[1].sample_id).is_final
    assert history.tally("d").failed == 1
    fail(run, PROMPTS[0], FailureClass.REJECTED)
    assert history_of(run).tally("d").failed == 2
