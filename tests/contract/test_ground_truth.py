"""Answers of a real model whose true ids are known, seen through providers with habits: what is rebuilt is the truth.

What differs must be flagged, or be of a kind that no count can show: other tokens, but as many of them.
"""

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
import yaml

from eagle3.records import Completion, Exactness, SegmentKind, Usage
from eagle3.simulator.answers import recorded_answer
from eagle3.simulator.habits import render
from eagle3.simulator.scenario import Provider
from eagle3.tokens.grammar import load_grammar
from eagle3.tokens.profiles import fit_profile
from eagle3.tokens.reconstruct import reconstruct
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.tokenizer import load_tokenizer

MODE = "default"


@pytest.fixture(scope="module")
def target(shared_data):
    directory = shared_data / "tokenizers/smollm2"
    grammar = load_grammar("smollm")
    return directory, grammar, load_tokenizer(directory, grammar)


@pytest.fixture(scope="module")
def recorded(project):
    path: Path = project / "examples/answers/smollm2-135m-instruct.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


@pytest.fixture(scope="module")
def providers(project):
    scenario = yaml.safe_load((project / "deployments/scenarios/demo.yaml").read_text("utf-8"))
    return [Provider.model_validate(values) for values in scenario["providers"]]


def completion_of(number, record, provider):
    outcome = render(recorded_answer(record), provider)
    return Completion(
        sample_id=f"{number:032x}",
        dataset=record["dataset"],
        reasoning=outcome.reasoning,
        content=outcome.content,
        tool_calls=(),
        finish_reason=outcome.finish_reason,
        native_finish_reason=None,
        provider=provider.name,
        model="smollm",
        quantization=None,
        generation_id=None,
        usage=Usage(prompt_tokens=outcome.prompt_tokens, completion_tokens=outcome.completion_tokens),
        cost_usd=Decimal(0),
        cost_is_estimated=False,
        prompt_token_ids=None,
        completion_token_ids=None,
        latency_s=0.0,
        attempts=1,
        from_cache=False,
        raw_body=b"",
    )


def test_prompts_are_those_the_model_saw(target, recorded):
    renderer = PromptRenderer(*target, MODE)
    for record in recorded:
        assert renderer.render_ids(record["messages"]) == record["prompt_ids"]


def test_ids_are_those_the_model_wrote(target, recorded, providers):
    _, grammar, tokenizer = target
    assert len({(provider.space_around_control_tokens, provider.end_token_billed) for provider in providers}) == 3
    for provider in providers:
        completions = [completion_of(number, record, provider) for number, record in enumerate(recorded)]
        profile = fit_profile(completions, grammar, tokenizer, MODE, min_samples=20)
        outcomes: Counter[str] = Counter()
        for record, completion in zip(recorded, completions, strict=True):
            result = reconstruct(completion, record["prompt_ids"], grammar, tokenizer, profile, mode=MODE)
            sample, truth = result.sample, record["output_ids"]
            found = list(sample.input_ids[sample.num_prompt_tokens :])
            if found == truth:
                outcomes["identical"] += 1
                assert sample.exactness is not Exactness.MISMATCH
            elif sample.exactness is Exactness.MISMATCH:
                outcomes["flagged"] += 1
            else:
                outcomes["same length, cannot be seen"] += 1
                assert len(found) == len(truth)
            masked = [segment for segment in sample.segments if segment.kind is SegmentKind.AMBIGUOUS]
            outcomes["masked tokens"] += sum(segment.stop - segment.start for segment in masked)
        print(provider.name, dict(outcomes), profile.to_json()["habits"])
        assert outcomes["identical"] > 0.9 * len(recorded)
        assert outcomes["same length, cannot be seen"] <= 0.01 * len(recorded)
        assert profile.habits.end_billed is provider.end_token_billed
        assert (profile.habits.tail_space == "strip_all") is provider.space_around_control_tokens
