"""Guarded generation against the look-alike: probes settle habits, and a provider that goes wrong is left."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3.artifacts import RunDirectory, Stage
from eagle3.errors import AuditFailedError, PreflightError
from eagle3.generation import open_session
from eagle3.generation.history import replay
from eagle3.preflight import Outcome, probe_checks, probe_endpoints
from eagle3.recipe import Recipe, recipe_from_mapping
from eagle3.simulator.process import SimulatorProcess
from eagle3.stages import run_stage
from tests.unit.conftest import recipe_values, write_target

PRICES = {"prompt_usd_per_mtok": 5, "completion_usd_per_mtok": 5, "quantization": "bf16"}
KEY = "LOOK_ALIKE_KEY"
FAST = {"latency": {"median_s": 0.02, "sigma": 0.1}}
NUM_PROMPTS = 200
BEFORE_CHANGE = 60
MAX_TOKENS = 80


def provider(name: str, **habits: Any) -> dict[str, Any]:
    return {"name": name, "tag": f"{name.lower()}/bf16", **PRICES, **FAST, **habits}


def make(folder: Path, providers: list[dict[str, Any]], **changes: Any) -> tuple[Recipe, RunDirectory, Path]:
    target = write_target(folder / "target")
    scenario = {
        "name": "guarded",
        "generation_lag_s": 0,
        "models": [{"id": "tiny/model", "suffix": "0101"}],
        "providers": providers,
    }
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"Reply with exactly: {number} things"}]})
        for number in range(NUM_PROMPTS)
    ]
    (folder / "one.jsonl").write_text("\n".join(lines) + "\n")
    values = recipe_values(target)
    values["prompts"]["datasets"][0]["sampling"] = {"max_tokens": MAX_TOKENS}
    values["generation"] = {
        "budget_usd": 5,
        "in_flight": 16,
        "provider": {
            "kind": "simulator",
            "model": "tiny/model",
            "scenario": "scenario.yaml",
            "answers": [],
            "routing": {"quantizations": ["bf16"]},
        },
        **changes.pop("generation", {}),
    }
    recipe = recipe_from_mapping({**values, **changes}, folder)
    run = RunDirectory(folder / "run")
    run_stage(Stage.PROMPTS, recipe, run, target)
    return recipe, run, target


def journal_of(recipe: Recipe, run: RunDirectory):
    return replay(run.stage_path(Stage.COMPLETIONS), ["one"], recipe.generation.budget_usd)


@pytest.mark.slow
def test_probes_settle_the_habits_of_every_endpoint_and_are_paid_from_the_budget(tmp_path):
    habits = {
        "Plain": {},
        "Spacer": {"space_around_control_tokens": True},
        "Endless": {"end_token_billed": False},
        "Both": {"space_around_control_tokens": True, "end_token_billed": False},
        "Compact": {"tool_arguments": "compact"},
    }
    providers = [provider(name, **values) for name, values in habits.items()]
    recipe, run, target = make(tmp_path, providers, generation={"preflight_probes": True})
    manifest = run_stage(Stage.COMPLETIONS, recipe, run, target)
    probes = json.loads((run.stage_path(Stage.COMPLETIONS) / "probes.json").read_text())["endpoints"]
    assert "probes.json" in [shard.path for shard in manifest.shards]
    for found in probes:
        own, settled = habits[found["provider"]], found["settled"]
        is_spaced = "space_around_control_tokens" in own
        assert settled["head_space"] == (["strip"] if is_spaced else ["keep"])
        assert settled["tail_space"] == (["strip_all"] if is_spaced else ["keep"])
        assert settled["end_billed"] == [own.get("end_token_billed", True)]
        assert settled["close_billed"] == [True]
        assert found["provider"] != "Compact" or settled["args_style"] == ["spaced"]
        assert all(rendered == billed for rendered, billed in found["prompt_counts"].values())
        assert Decimal(found["spent_usd"]) <= Decimal("0.01")
        assert found["problems"] == []
    asked_usd = sum(Decimal(found["spent_usd"]) for found in probes)
    answers_usd = Decimal(manifest.stats["datasets"]["one"]["cost_usd"])
    assert Decimal(manifest.stats["spent_usd"]) == asked_usd + answers_usd
    assert manifest.stats["samples"] == NUM_PROMPTS
    _, ledger = journal_of(recipe, run)
    assert ledger.spent_usd == asked_usd + answers_usd

    samples = run_stage(Stage.TOKEN_SAMPLES, recipe, run, target)
    assert samples.stats["exactness"] == {"count_verified": NUM_PROMPTS}
    assert run_stage(Stage.AUDIT, recipe, run, target).stats["dropped"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"end_token_billed": False}, "A06, Acme"),
        ({"space_around_control_tokens": True}, "A0[69], Acme"),
        ({"model_suffix": "0202"}, "A19, the whole run: replies name 2 models"),
    ],
    ids=["end no longer billed", "spaces appear", "another model"],
)
def test_a_provider_that_changes_in_mid_run_costs_no_more_than_the_bound(tmp_path, capsys, change, rule):
    acme = provider("Acme", change={"after_answers": BEFORE_CHANGE, **change})
    bound = Decimal("0.01")
    recipe, run, target = make(tmp_path, [acme], audit={"max_at_risk_usd": str(bound)})
    with pytest.raises(AuditFailedError, match=rule) as caught:
        run_stage(Stage.COMPLETIONS, recipe, run, target)
    assert "At risk are" in str(caught.value)
    history, ledger = journal_of(recipe, run)
    bought = history.tally("one").samples
    assert BEFORE_CHANGE < bought < NUM_PROMPTS
    dearest_usd = max(
        Decimal(place.read()["cost_usd"]) for sample in history.samples.values() if (place := sample.answer)
    )
    wasted_usd = dearest_usd * (bought - BEFORE_CHANGE)
    with capsys.disabled():
        print(f"\n{rule}: {wasted_usd} of {ledger.spent_usd} USD after the change, bound {bound}")
    assert wasted_usd <= bound + 16 * dearest_usd
    assert ledger.held_usd == 0

    # A second start looks at what is there and buys nothing.
    with pytest.raises(AuditFailedError, match=rule):
        run_stage(Stage.COMPLETIONS, recipe, run, target)
    assert journal_of(recipe, run)[0].tally("one").samples == bought


@pytest.mark.slow
def test_rebuilt_ids_are_held_against_native_ones(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "any")
    recipe, _, target = make(tmp_path, [provider("Acme", returns_token_ids=True)])
    values = recipe.model_dump(mode="json")
    scenario, grammar = tmp_path / "scenario.yaml", str(target / "grammar.yaml")
    with SimulatorProcess(scenario, tokenizer=target, grammar=grammar, mode="thinking") as process:
        server = {"kind": "openai", "base_url": process.base_url, "api_key_env": KEY, "model": "tiny/model"}
        values["generation"]["provider"] = server
        local = recipe_from_mapping(values, tmp_path)
        run = RunDirectory(tmp_path / "local")
        run_stage(Stage.PROMPTS, local, run, target)
        run_stage(Stage.COMPLETIONS, local, run, target)
    manifest = run_stage(Stage.TOKEN_SAMPLES, local, run, target)
    assert manifest.stats["exactness"] == {"exact_ids": NUM_PROMPTS}
    assert manifest.stats["truth"] == {"identical": NUM_PROMPTS}


def test_a_preflight_that_fails_spends_nothing(tmp_path):
    recipe, run, target = make(tmp_path, [provider("Acme")])
    (target / "config.json").write_text('{"eos_token_id": 265, "vocab_size": 267}')
    with pytest.raises(PreflightError, match="P4 end of an answer"):
        run_stage(Stage.COMPLETIONS, recipe, run, target)
    assert journal_of(recipe, run)[1].spent_usd == 0


def test_an_endpoint_with_another_template_is_refused_after_the_probes(tmp_path):
    recipe, run, target = make(tmp_path, [provider("Acme")], generation={"preflight_probes": True})
    template = target / "chat_template.jinja"
    other = write_target(tmp_path / "other")
    (other / "chat_template.jinja").write_text(template.read_text().replace("<user>", "<user>hey "))

    with open_session(recipe, run, other) as session:
        path = probe_endpoints(session, recipe, session.stage, target)
    failed = [check for check in probe_checks(path) if check.outcome is Outcome.FAILED]
    assert [check.id for check in failed] == ["P10"]
    assert "expected" in failed[0].found
