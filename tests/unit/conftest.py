"""A tiny but whole target and run: byte-level tokenizer, chat template, grammar, stages sealed from given samples."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, settings

from eagle3.artifacts import RunDirectory, Stage, StageManifest
from eagle3.formats import (
    COMPLETIONS,
    TOKEN_SAMPLES,
    completion_to_row,
    prompt_to_json,
    token_sample_to_row,
    write_json_lines,
    write_rows,
)
from eagle3.recipe import Recipe, recipe_from_mapping
from eagle3.records import Completion, PromptRecord, TokenSample, ToolCall, Usage, sample_id_of
from eagle3.tokens.hf_backend import byte_alphabet
from eagle3.tokens.layout import Habits
from eagle3.tokens.profiles import AXES, ProviderProfile, profile_from_json, write_profiles
from eagle3.tokens.reconstruct import reconstruct
from eagle3.tokens.rendering import PromptRenderer, open_renderer

# Machines under load are slow at times; a property must not fail for that, and must fail the same way twice.
settings.register_profile("eagle3", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eagle3")

CONTROL = ["<end>", "<user>", "<bot>", "<think>", "</think>", "<tools>", "</tools>", "<call>", "<arg>", "</call>"]
NAMES = ["end", "user", "bot", "think_open", "think_close", "section", "section_end", "call", "arg", "call_end"]
RESERVED = "<reserved>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'forbidden' or m.content == 'refuse me' %}{{ raise_exception('refused') }}"
    "{% endif %}<user>{{ m.role }}: {{ m.content }}<end>{% endfor %}<bot>{% if thinking %}<think>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def write_target(directory: Path, *, normalizer: str = "none") -> Path:
    directory.mkdir(parents=True)
    alphabet = {byte: character for character, byte in byte_alphabet().items()}
    vocabulary = {alphabet[byte]: byte for byte in range(256)}
    added = [{"id": 256 + index, "content": text, "special": True} for index, text in enumerate([*CONTROL, RESERVED])]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if normalizer == "nfc" else None,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(document))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    grammar = {
        "name": "tiny",
        "version": 1,
        "tokenizer": {"kind": "hf", "file": "tokenizer.json", "vocab_size": 267, "normalizer": normalizer},
        "control": {
            name: {"text": text, "id": 256 + index}
            for index, (name, text) in enumerate(zip(NAMES, CONTROL, strict=True))
        },
        "modes": {
            "thinking": {
                "template_options": {"thinking": True},
                "prompt_ends_with": "<bot><think>",
                "reasoning": {"after": [{"token": "think_close"}]},
                "close": "think_close",
            },
            "plain": {"prompt_ends_with": "<bot>"},
        },
        "end": {"stop": ["end"], "tool_calls": ["end"]},
        "tools": {
            "before": [{"token": "section"}],
            "call": [
                {"token": "call"},
                {"text": "{id}"},
                {"token": "arg"},
                {"text": "{arguments}"},
                {"token": "call_end"},
            ],
            "after": [{"token": "section_end"}],
            "implicit_close": True,
        },
    }
    (directory / "grammar.yaml").write_text(yaml.safe_dump(grammar, sort_keys=False))
    return directory


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def nfc_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "nfc", normalizer="nfc")


_RENDERERS: dict[tuple[Path, str], PromptRenderer] = {}


def renderer_of(recipe: Recipe, target: Path) -> PromptRenderer:
    """The renderer of a target, loaded once per session and mode."""
    key = target, recipe.target.mode
    if key not in _RENDERERS:
        _RENDERERS[key] = open_renderer(recipe, target)
    return _RENDERERS[key]


@dataclass(frozen=True)
class TinyRun:
    """A run directory with the recipe and the target that fill it."""

    recipe: Recipe
    run: RunDirectory
    target: Path

    @property
    def renderer(self) -> PromptRenderer:
        """Renderer of the target, with grammar and tokenizer in it."""
        return renderer_of(self.recipe, self.target)

    def with_recipe(self, **sections: Any) -> "TinyRun":
        """The same run under a recipe with some values replaced."""
        return replace(self, recipe=self.recipe.model_copy(update=sections))

    def prompt(self, text: str, *, dataset: str = "one", replica: int = 0, tools: Sequence[Any] = ()) -> PromptRecord:
        messages = ({"role": "user", "content": text},)
        return PromptRecord(
            sample_id=sample_id_of(dataset, messages, tools, replica),
            dataset=dataset,
            prompt_id=text,
            messages=messages,
            tools=tuple(tools),
            replica=replica,
        )

    def completion(
        self,
        prompt: PromptRecord,
        *,
        reasoning: str | None = "I think so.",
        content: str | None = "Yes.",
        calls: Sequence[ToolCall] = (),
        provider: str = "Acme",
        delta: int = 0,
        **changes: Any,
    ) -> Completion:
        """A reply that agrees with the grammar; `delta` ids are billed too few."""
        reply = Completion(
            sample_id=prompt.sample_id,
            dataset=prompt.dataset,
            reasoning=reasoning,
            content=content,
            tool_calls=tuple(calls),
            finish_reason="tool_calls" if calls else "stop",
            native_finish_reason=None,
            provider=provider,
            model="tiny/model",
            quantization="bf16",
            generation_id=None,
            usage=Usage(prompt_tokens=len(self.prompt_ids(prompt)), completion_tokens=1),
            cost_usd=Decimal("0.001"),
            cost_is_estimated=False,
            prompt_token_ids=None,
            completion_token_ids=None,
            latency_s=1.0,
            attempts=1,
            from_cache=False,
            raw_body=b"{}",
        )
        reply = replace(reply, **changes)
        if "usage" not in changes:
            rebuilt = self.sample(prompt, reply)
            billed = len(rebuilt.input_ids) - rebuilt.num_prompt_tokens - delta
            reply = replace(reply, usage=reply.usage._replace(completion_tokens=billed))
        return reply

    def prompt_ids(self, prompt: PromptRecord) -> list[int]:
        return renderer_of(self.recipe, self.target).render_ids(prompt.messages, prompt.tools)

    def sample(
        self, prompt: PromptRecord, completion: Completion, profile: ProviderProfile | None = None
    ) -> TokenSample:
        renderer = renderer_of(self.recipe, self.target)
        return reconstruct(
            completion,
            renderer.render_ids(prompt.messages, prompt.tools),
            renderer.grammar,
            renderer.tokenizer,
            profile or known_profile(completion.provider, renderer.mode),
            mode=renderer.mode,
        ).sample

    def seal_prompts(self, prompts: Sequence[PromptRecord]) -> StageManifest:
        stage = self.run.open_stage(Stage.PROMPTS, {}, {})
        shards = [
            stage.commit_shard(
                f"{dataset}/shard-00000.jsonl",
                lambda path, rows=rows: write_json_lines(path, map(prompt_to_json, rows)),
                num_samples=len(rows),
            )
            for dataset, rows in _by_dataset(prompts).items()
        ]
        return stage.seal(shards, {})

    def seal_completions(self, completions: Sequence[Completion]) -> StageManifest:
        stage = self.run.open_stage(Stage.COMPLETIONS, {}, {})
        shards = [
            stage.commit_shard(
                f"{dataset}/shard-00000.parquet",
                lambda path, rows=rows: write_rows(path, list(map(completion_to_row, rows)), COMPLETIONS),
                num_samples=len(rows),
            )
            for dataset, rows in _by_dataset(completions).items()
        ]
        return stage.seal(shards, {})

    def seal_samples(
        self, samples: Sequence[TokenSample], profiles: Sequence[ProviderProfile] = (), *, shard_samples: int = 1000
    ) -> StageManifest:
        stage = self.run.open_stage(Stage.TOKEN_SAMPLES, {"shard_samples": shard_samples}, {})
        shards = [
            stage.commit_shard(
                f"{dataset}/shard-{number:05d}.parquet",
                lambda path, chunk=rows[start : start + shard_samples]: write_rows(
                    path, list(map(token_sample_to_row, chunk)), TOKEN_SAMPLES
                ),
                num_samples=len(rows[start : start + shard_samples]),
            )
            for dataset, rows in _by_dataset(samples).items()
            for number, start in enumerate(range(0, len(rows), shard_samples))
        ]
        shards.append(stage.commit_shard("profiles.json", lambda path: write_profiles(path, profiles), num_samples=0))
        return stage.seal(shards, {})


def known_profile(
    provider: str, mode: str, *, unknown: Sequence[str] = (), habits: Habits | None = None
) -> ProviderProfile:
    """The profile of a provider whose habits are known but for some axes."""
    habits = habits or Habits()
    return profile_from_json(
        {
            "provider": provider,
            "model": "tiny/model",
            "mode": mode,
            "habits": {axis: getattr(habits, axis) for axis in AXES},
            "identified": {axis: axis not in unknown for axis in AXES},
            "discriminating": dict.fromkeys(AXES, 100),
            "rivals": [],
            "samples": 100,
            "exact": 100,
            "deltas": {"0": 100},
        }
    )


@pytest.fixture(scope="session")
def profile_of() -> Callable[..., ProviderProfile]:
    return known_profile


def _by_dataset(rows: Sequence[Any]) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = {}
    for row in rows:
        result.setdefault(row.dataset, []).append(row)
    return result


def recipe_values(
    target: Path, *, mode: str = "thinking", datasets: Sequence[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {
        "name": "tiny",
        "target": {
            "name": "tiny",
            "weights": {"kind": "directory", "path": str(target)},
            "grammar": str(target / "grammar.yaml"),
            "mode": mode,
        },
        "prompts": {"datasets": datasets or [{"name": "one", "path": "one.jsonl"}]},
        "generation": {
            "budget_usd": 1,
            "provider": {"kind": "openrouter", "model": "tiny/model", "routing": {"quantizations": ["bf16"]}},
        },
        "corpus": {"max_sample_tokens": 512, "validation_samples": 4},
    }


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_target: Path) -> TinyRun:
    recipe = recipe_from_mapping(recipe_values(tiny_target), tmp_path)
    return TinyRun(recipe, RunDirectory(tmp_path / "run"), tiny_target)


@pytest.fixture
def make_run(tmp_path: Path, tiny_target: Path) -> Callable[..., TinyRun]:
    def make(target: Path = tiny_target, name: str = "run", **values: Any) -> TinyRun:
        recipe = recipe_from_mapping(recipe_values(target, **values), tmp_path)
        return TinyRun(recipe, RunDirectory(tmp_path / name), target)

    return make
