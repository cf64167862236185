"""The example prompts and answers keep what the simulator, the demo and the drift test rely on."""

import importlib.util
import json
import os
import unicodedata
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
DATASETS = ("code", "reasoning", "chat")
ANSWER_KEYS = ["id", "dataset", "messages", "prompt_ids", "output_ids", "text", "finish_reason", "sampling"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Parse JSON lines; only a newline ends a line."""
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def word_5_grams(record: dict[str, Any]) -> set[tuple[str, ...]]:
    words = " ".join(message["content"] for message in record["messages"]).split()
    return {tuple(words[start : start + 5]) for start in range(max(1, len(words) - 4))}


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    return [line for dataset in DATASETS for line in read_lines(EXAMPLES / "prompts" / f"{dataset}.jsonl")]


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return read_lines(EXAMPLES / "answers" / "smollm2-135m-instruct.jsonl")


@pytest.fixture(scope="module")
def scripted() -> list[dict[str, Any]]:
    return read_lines(EXAMPLES / "answers" / "scripted.jsonl")


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Tokenizer of the recorded model: from a prepared target named by EAGLE3_TARGET_DIR, else from the shared data."""
    folder = os.environ.get("EAGLE3_TARGET_DIR")
    if folder is None:
        folder = cast("Path", request.getfixturevalue("shared_data")) / "tokenizers" / "smollm2"
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def test_three_datasets_hold_enough_well_formed_prompts(prompts: list[dict[str, Any]]) -> None:
    assert len(prompts) >= 600
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert list(prompt) == ["id", "messages"]
        roles = [message["role"] for message in prompt["messages"]]
        assert roles in (["user"], ["system", "user"], ["user", "assistant", "user"]), prompt["id"]
        num_words = sum(len(message["content"].split()) for message in prompt["messages"])
        assert 8 <= num_words <= 60, prompt["id"]


def test_no_two_prompts_are_nearly_the_same(prompts: list[dict[str, Any]]) -> None:
    grams = [(prompt["id"], word_5_grams(prompt)) for prompt in prompts]
    close = [(one, other) for (one, a), (other, b) in combinations(grams, 2) if len(a & b) / len(a | b) >= 0.9]
    assert close == []


def test_the_prompt_files_are_what_the_script_writes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("write_prompts", EXAMPLES / "write_prompts.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write_datasets(tmp_path)
    for dataset in DATASETS:
        name = f"{dataset}.jsonl"
        assert (tmp_path / name).read_bytes() == (EXAMPLES / "prompts" / name).read_bytes(), name


def test_every_prompt_has_one_well_formed_answer(prompts: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    assert len(answers) >= 300
    assert [answer["id"] for answer in answers] == [prompt["id"] for prompt in prompts]
    for answer, prompt in zip(answers, prompts, strict=True):
        assert list(answer) == ANSWER_KEYS
        assert answer["messages"] == prompt["messages"], answer["id"]
        assert answer["dataset"] == answer["id"].rsplit("-", 1)[0]
        assert answer["finish_reason"] in ("stop", "length")
        assert answer["prompt_ids"], answer["id"]
        assert 1 <= len(answer["output_ids"]) <= answer["sampling"]["max_tokens"], answer["id"]
        assert answer["sampling"]["temperature"] == (0.7 if answer["dataset"] == "chat" else 0.0)


def test_most_answers_stop_and_none_is_empty(answers: list[dict[str, Any]]) -> None:
    num_stopped = sum(answer["finish_reason"] == "stop" for answer in answers)
    assert num_stopped > len(answers) // 2
    assert all(answer["text"].strip() for answer in answers)


def test_true_ids_decode_to_the_recorded_text(answers: list[dict[str, Any]], tokenizer: Tokenizer) -> None:
    """The end id closes exactly the answers that stopped, and every other id is in the text, verbatim."""
    end_ids = {answer["output_ids"][-1] for answer in answers if answer["finish_reason"] == "stop"}
    assert len(end_ids) == 1
    (end_id,) = end_ids
    assert tokenizer.id_to_token(end_id) == "<|im_end|>"
    for answer in answers:
        ids = answer["output_ids"][:-1] if answer["finish_reason"] == "stop" else answer["output_ids"]
        assert end_id not in ids, answer["id"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == answer["text"], answer["id"]


def test_some_answers_are_not_the_canonical_encoding_of_their_text(
    answers: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    """Real retokenization drift is in the data, of both kinds: seen by a token count, and not."""
    drifted: list[tuple[int, int]] = []
    for answer in answers:
        ids = answer["output_ids"][:-1] if answer["finish_reason"] == "stop" else answer["output_ids"]
        canonical = tokenizer.encode(answer["text"], add_special_tokens=False).ids
        if canonical != ids:
            drifted.append((len(ids), len(canonical)))
    assert len(drifted) < len(answers) // 4
    assert any(found != canonical for found, canonical in drifted)


def test_scripted_answers_are_well_formed(scripted: list[dict[str, Any]], prompts: list[dict[str, Any]]) -> None:
    assert len(scripted) >= 24
    keys = {"id", "dataset", "messages", "reasoning", "content", "tool_calls", "finish_reason"}
    asked = {json.dumps(record["messages"]) for record in [*scripted, *prompts]}
    assert len(asked) == len(scripted) + len(prompts)
    for answer in scripted:
        assert set(answer) - {"tools"} == keys, answer["id"]
        declared = {tool["function"]["name"] for tool in answer.get("tools", [])}
        for call in answer["tool_calls"]:
            assert set(call) == {"id", "name", "arguments"}
            assert call["name"] in declared, answer["id"]
            assert isinstance(json.loads(call["arguments"]), dict), answer["id"]
        assert (answer["finish_reason"] == "tool_calls") == bool(answer["tool_calls"]), answer["id"]


def test_scripted_answers_cover_the_hard_cases(scripted: list[dict[str, Any]]) -> None:
    contents = [answer["content"] for answer in scripted if answer["content"]]
    arguments = [call["arguments"] for answer in scripted for call in answer["tool_calls"]]
    covered = {
        "reasoning and content": any(a["reasoning"] and a["content"] for a in scripted),
        "empty reasoning": any(a["reasoning"] == "" for a in scripted),
        "no reasoning": any(a["reasoning"] is None for a in scripted),
        "leading space": any(c.startswith(" ") for c in contents),
        "leading newline": any(c.startswith("\n") for c in contents),
        "CRLF": any("\r\n" in c for c in contents),
        "Han": any("\u4e00" <= char <= "\u9fff" for c in contents for char in c),
        "ZWJ emoji": any("\u200d" in c for c in contents),
        "combining mark": any(unicodedata.normalize("NFC", c) != c for c in contents),
        "digits only": any(c.isdecimal() for c in contents),
        "code block": any("```" in c for c in contents),
        "one, two and three calls": {1, 2, 3} <= {len(a["tool_calls"]) for a in scripted},
        "content and calls": any(a["content"] and a["tool_calls"] for a in scripted),
        "spaced arguments": any('": ' in text for text in arguments),
        "compact arguments": any('":"' in text for text in arguments),
        "cut inside reasoning": any(
            a["finish_reason"] == "length" and a["reasoning"] and a["content"] is None for a in scripted
        ),
    }
    assert [case for case, is_covered in covered.items() if not is_covered] == []
