"""Recipes: every mistake is named, defaults are resolved once, and only what shapes bytes is identity."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel

from eagle3.errors import RecipeError
from eagle3.recipe import OPERATIONAL, Recipe, Sampling, Section, load_recipe, recipe_from_mapping

VALUES: dict[str, Any] = {
    "name": "tiny",
    "target": {"name": "t", "weights": {"kind": "directory", "path": "model"}, "grammar": "smollm"},
    "prompts": {"datasets": [{"name": "code", "path": "code.jsonl"}, {"name": "chat", "path": "chat.jsonl"}]},
    "generation": {"budget_usd": "1.50", "provider": {"kind": "openrouter", "model": "a/b"}},
    "corpus": {"max_sample_tokens": 1024},
}


def values(**changes: Any) -> dict[str, Any]:
    """The valid recipe with dotted keys replaced."""
    document = copy.deepcopy(VALUES)
    for key, value in changes.items():
        node = document
        *parents, last = key.split("__")
        for part in parents:
            node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
        node[last] = value
    return document


def recipe(**changes: Any) -> Recipe:
    return recipe_from_mapping(values(**changes), Path("/nowhere"))


def test_defaults_are_resolved():
    made = recipe()
    assert made.generation.budget_usd == Decimal("1.50")
    assert made.generation.in_flight == 2000
    assert made.prompts.special_literals == "drop"
    assert made.audit.max_drift_share > made.audit.max_mismatch_share
    assert made.prompts.datasets[0].sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"corpos": {}}, "corpos: unknown key"),
        ({"generation__budget": 1}, "generation.budget: unknown key"),
        ({"generation__provider__routing": {"quantisation": []}}, "routing.quantisation: unknown key"),
        ({"generation__provider__kind": "magic"}, "generation.provider"),
        ({"generation__budget_usd": 0}, "generation.budget_usd: Input should be greater than 0, found 0"),
        ({"generation__in_flight": 0}, "generation.in_flight"),
        ({"prompts__datasets": []}, "prompts.datasets"),
        ({"prompts__datasets__1__name": "code"}, "must be unique, found twice: ['code']"),
        ({"prompts__datasets__0__name": "Code Set"}, "prompts.datasets.0.name"),
        ({"prompts__datasets__0__replicas": 0}, "prompts.datasets.0.replicas"),
        ({"corpus__min_exactness": "mismatch"}, "corpus.min_exactness"),
        ({"corpus__max_sample_tokens": 99, "training__total_seq_len": 98}, "more than training.total_seq_len 98"),
        ({"audit__max_drift_share": 2}, "audit.max_drift_share"),
        ({"name": "Has Spaces"}, "name"),
        ({"target": {"name": "t"}}, "target.grammar: required"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], problem: str):
    with pytest.raises(RecipeError) as caught:
        recipe(**changes)
    assert problem in str(caught.value)
    assert caught.value.exit_code == 2


def test_many_mistakes_are_cut_to_five():
    with pytest.raises(RecipeError, match="and 2 more"):
        recipe(**{f"extra{number}": number for number in range(7)})


def test_a_recipe_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        recipe().seed = 3  # pyright: ignore[reportAttributeAccessIssue] - the point of the test


def test_files_and_overrides(tmp_path: Path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(VALUES))
    loaded = load_recipe(
        path,
        ["generation.budget_usd=3", "prompts.datasets.1.max_samples=7", "audit.stop_on_critical=false", "seed=5"],
    )
    assert loaded.generation.budget_usd == 3
    assert loaded.prompts.datasets[1].max_samples == 7
    assert not loaded.audit.stop_on_critical
    assert loaded.seed == 5
    assert loaded.resolve(Path("code.jsonl")) == (tmp_path / "code.jsonl").resolve()
    assert loaded.directory == tmp_path.resolve()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("seed", "must look like section.key=value"),
        ("=1", "must look like section.key=value"),
        ("seed=[1", "not valid YAML"),
        ("name.first=x", "inside a plain value"),
        ("prompts.datasets.9.name=x", "must be an index below 2"),
        ("prompts.datasets.first.name=x", "must be an index below 2"),
        ("generation.budgett_usd=3", "unknown key"),
    ],
)
def test_wrong_overrides_are_named(tmp_path: Path, override: str, problem: str):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(VALUES))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [override])
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"), [("a: [", "not valid YAML"), ("- a", "found list"), ("", "found NoneType")]
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, problem: str):
    path = tmp_path / "tiny.yaml"
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(path)
    path.write_text(text)
    with pytest.raises(RecipeError, match=problem):
        load_recipe(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"generation__budget_usd": 99},
        {"generation__in_flight": 3},
        {"generation__max_attempts": 2},
        {"generation__provider__api_key_env": "OTHER_KEY"},
        {"generation__provider__base_url": "http://localhost:1"},
        {"prompts__datasets__0__path": "moved/code.jsonl"},
        {"target__weights__path": "moved/model"},
        {"target__name": "T"},
        {"target__grammar": "qwen3"},
        {"corpus__validation_samples": 5},
        {"training__epochs": 9},
    ],
)
def test_operational_and_later_values_keep_the_run(changes: dict[str, Any]):
    assert recipe(**changes).run_name == recipe().run_name


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"target__mode": "thinking"},
        {"generation__provider__model": "a/c"},
        {"generation__provider__routing": {"quantizations": ["fp8"]}},
        {"prompts__datasets__0__replicas": 2},
        {"prompts__datasets__0__sampling": {"temperature": 0.7}},
        {"prompts__special_literals": "keep"},
    ],
)
def test_what_shapes_the_answers_starts_another_run(changes: dict[str, Any]):
    assert recipe(**changes).run_name != recipe().run_name


def test_identity_is_json_without_operational_values():
    identity = recipe().generation.identity()
    assert "budget_usd" not in identity
    assert identity["provider"]["model"] == "a/b"
    assert "api_key_env" not in identity["provider"]


def test_defaults_are_no_part_of_identity_so_that_a_new_setting_keeps_old_runs():
    class Older(Section):
        kind: Literal["a"] = "a"
        size: int

    class Newer(Older):
        extra: int | None = None
        inner: Sampling = Sampling()

    older = Older(size=1).identity()
    assert older == {"kind": "a", "size": 1}
    assert Newer(size=1).identity() == Newer(size=1, inner=Sampling(top_p=1.0)).identity() == older
    assert Newer(size=1, extra=0).identity() == {**older, "extra": 0}
    assert Newer(size=1, inner=Sampling(top_p=0.5)).identity() == {**older, "inner": {"top_p": 0.5}}


def test_paths_keys_and_budgets_are_operational_everywhere():
    for section, name, field in _fields(Recipe):
        if name in {"path", "base_url", "api_key_env", "budget_usd", "num_threads", "scenario", "answers"}:
            assert OPERATIONAL in field.metadata, f"{section}.{name}"


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, str, Any]]:
    seen: set[type[BaseModel]] = set()
    waiting = [*Section.__subclasses__(), model]
    for section in waiting:
        if section not in seen:
            seen.add(section)
            yield from ((section.__name__, name, field) for name, field in section.model_fields.items())


def test_importing_the_recipe_loads_no_heavy_library():
    program = "import sys, eagle3.recipe; print(sorted({'torch', 'transformers', 'prefect'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"
