"""Recorded replies of real providers against what they billed: the count oracle, provider by provider."""

import json
from collections import defaultdict
from dataclasses import replace
from decimal import Decimal

import pytest

from eagle3.providers.wire import parse_reply
from eagle3.records import Completion, Exactness, ToolCall, Usage
from eagle3.tokens.grammar import load_grammar
from eagle3.tokens.profiles import fit_profile
from eagle3.tokens.reconstruct import reconstruct
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.tokenizer import load_tokenizer

KIMI = "moonshotai/kimi-k2.5"
ANOMALY = "multi_tool_streaming"
"""The one recorded reply whose billed count nothing explains; it must be flagged, not repaired."""


def completion_of(number, record):
    message, usage = record["message"], record["usage"]
    return Completion(
        sample_id=f"{number:032x}",
        dataset="recordings",
        reasoning=message.get("reasoning"),
        content=message.get("content"),
        tool_calls=tuple(ToolCall(id=call["id"], **call["function"]) for call in message.get("tool_calls") or ()),
        finish_reason=record["finish_reason"],
        native_finish_reason=None,
        provider=record["provider"],
        model=record["request"]["model"],
        quantization=None,
        generation_id=None,
        usage=Usage(prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"]),
        cost_usd=Decimal(0),
        cost_is_estimated=False,
        prompt_token_ids=None,
        completion_token_ids=None,
        latency_s=0.0,
        attempts=1,
        from_cache=False,
        raw_body=b"",
    )


@pytest.fixture(scope="module")
def families(shared_data):
    loaded = {}
    for name, mode in (("kimi-k2.5", "thinking"), ("kimi-k2", "default")):
        grammar = load_grammar(name)
        loaded[name] = grammar, load_tokenizer(shared_data / "kimi-k2.5", grammar), mode
    return loaded


def read_lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


@pytest.fixture(scope="module")
def records(shared_data):
    return read_lines(shared_data / "recordings/kimi_responses.jsonl")


@pytest.fixture(scope="module")
def results(families, records):
    """Per provider: its profile, and what became of each of its replies."""
    groups = defaultdict(list)
    for number, record in enumerate(records):
        groups[record["provider"]].append((record, completion_of(number, record)))
    rebuilt = {}
    for provider, members in groups.items():
        family = "kimi-k2.5" if members[0][1].model == KIMI else "kimi-k2"
        grammar, tokenizer, mode = families[family]
        completions = [completion for _, completion in members]
        profile = fit_profile(completions, grammar, tokenizer, mode, min_samples=20)
        found = [
            (record, reconstruct(completion, [], grammar, tokenizer, profile, mode=mode))
            for record, completion in members
        ]
        rebuilt[provider] = profile, found
    return rebuilt


@pytest.mark.parametrize(
    ("provider", "exact", "habits"),
    [
        ("Chutes", 3, {"end_billed": True, "close_billed": True, "args_style": "verbatim"}),
        ("Inceptron", 1, {"head_space": "strip", "end_billed": True}),
        ("ModelRun", 1, {"head_space": "strip", "tail_space": "strip", "end_billed": True}),
        ("groq-kimi-k2", 5, {"args_style": "spaced", "head_space": "keep", "end_billed": True}),
        ("huggingface-kimi-k2", 5, {"args_style": "spaced", "head_space": "keep", "end_billed": True}),
        ("avian-kimi", 2, {"head_space": "strip", "tail_space": "strip", "end_billed": False, "close_billed": True}),
    ],
)
def test_every_provider_bills_what_was_rebuilt(results, provider, exact, habits):
    profile, found = results[provider]
    print(json.dumps(profile.to_json()["habits"]))
    assert {axis: getattr(profile.habits, axis) for axis in habits} == habits
    assert profile.num_exact == exact
    assert sum(result.sample.delta == 0 for _, result in found) == exact


def test_anomaly_is_flagged_and_not_repaired(results):
    _, found = results["avian-kimi"]
    record, result = found[0]
    assert ANOMALY in record["source"]
    assert result.sample.exactness is Exactness.MISMATCH
    assert [result.sample.delta for _, result in found] == [7, 0, 0]


def test_few_replies_identify_no_habit(results):
    """One or three replies are no proof; what the counts leave open is masked."""
    for provider in ("Chutes", "Inceptron", "ModelRun"):
        profile, found = results[provider]
        assert not any(axis.identified for name, axis in profile.axes.items() if name == "head_space")
        assert {result.sample.exactness for _, result in found} == {Exactness.COUNT_AMBIGUOUS}
        for _, result in found:
            masked = [segment for segment in result.sample.segments if segment.kind == "ambiguous"]
            assert 1 <= sum(segment.stop - segment.start for segment in masked) <= 4


def test_prompts_have_as_many_tokens_as_were_billed(families, records, shared_data):
    """First turns, with and without tools. Later turns differ by what providers make of the history."""
    grammar, tokenizer, mode = families["kimi-k2.5"]
    renderer = PromptRenderer(shared_data / "kimi-k2.5", grammar, tokenizer, mode)
    compared = []
    for record in records:
        request = record["request"]
        # One provider adds a tool prompt of its own.
        is_own_template = record["provider"] == "avian-kimi" and request.get("tools")
        if request["model"] != KIMI or is_own_template or any(m["role"] == "assistant" for m in request["messages"]):
            continue
        ids = renderer.render_ids(request["messages"], request.get("tools") or [])
        compared.append((len(ids), record["usage"]["prompt_tokens"]))
    assert sorted(compared) == [(21, 21), (21, 21), (21, 21), (69, 69), (129, 129)]


def test_raw_bodies_give_the_same_ids_as_the_parsed_replies(families, records, results, shared_data):
    grammar, tokenizer, mode = families["kimi-k2.5"]
    compared = 0
    for raw in read_lines(shared_data / "recordings/openrouter_raw_k25.jsonl"):
        if raw["request"].get("stream"):
            continue
        answer = parse_reply(raw["raw_body"].encode()).answer
        number, record = next(
            (number, record) for number, record in enumerate(records) if record["request"] == raw["request"]
        )
        parsed = completion_of(number, record)
        from_raw = replace(
            parsed, reasoning=answer.reasoning, content=answer.content, tool_calls=tuple(answer.tool_calls)
        )
        profile, found = results[record["provider"]]
        expected = next(result for known, result in found if known is record)
        assert reconstruct(from_raw, [], grammar, tokenizer, profile, mode=mode).sample == expected.sample
        assert answer.usage is not None
        assert answer.usage.completion_tokens == parsed.usage.completion_tokens
        compared += 1
    assert compared == 3
