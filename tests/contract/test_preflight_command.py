"""`eagle3 preflight`, offline and against the look-alike: what it prints, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from eagle3.artifacts import sha256_file
from eagle3.cli import app
from tests.unit.conftest import recipe_values, write_target


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target, prompts, a scenario with two providers, and the recipe that names them."""
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    target = write_target(tmp_path / "target")
    (target / "config.json").write_text('{"eos_token_id": 256, "vocab_size": 267, "model_type": "llama"}')
    prices = {"prompt_usd_per_mtok": 5, "completion_usd_per_mtok": 5, "quantization": "bf16"}
    prices |= {"latency": {"median_s": 0.02, "sigma": 0.1}}
    providers = [
        {"name": name, "tag": f"{name.lower()}/bf16", **prices, **habits}
        for name, habits in (("Plain", {}), ("Spacer", {"space_around_control_tokens": True}))
    ]
    scenario = {"name": "two", "models": [{"id": "tiny/model", "suffix": "0101"}], "providers": providers}
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    prompt = {"messages": [{"role": "user", "content": "Reply with exactly: 42"}]}
    (tmp_path / "one.jsonl").write_text(json.dumps(prompt) + "\n")
    values = recipe_values(target)
    provider = {"kind": "simulator", "model": "tiny/model", "scenario": "scenario.yaml", "answers": []}
    values["generation"] = {"budget_usd": 1, "provider": {**provider, "routing": {"quantizations": ["bf16"]}}}
    write_recipe(tmp_path, values)
    return tmp_path


def write_recipe(folder: Path, values: dict[str, Any]) -> None:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(values, default=str))))


def preflight(folder: Path, *options: str) -> Any:
    command = ["preflight", str(folder / "recipe.yaml"), "--run-root", str(folder / "runs"), "--until", "corpus"]
    return CliRunner().invoke(app, [*command, *options])


def checks_of(done: Any) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for check in json.loads(done.stdout)["checks"]:
        found.setdefault(check["id"], []).append(check)
    return found


def test_a_sound_recipe_passes_and_nothing_is_written(folder):
    done = preflight(folder, "--json")
    assert done.exit_code == 0, done.output
    checks = checks_of(done)
    assert {f"P{number}" for number in range(10)} <= checks.keys()
    assert not any(check["outcome"] == "failed" for each in checks.values() for check in each)
    assert sha256_file(folder / "target" / "tokenizer.json")[:12] in checks["P1"][0]["found"]
    assert not (folder / "runs").exists()
    shown = preflight(folder)
    assert shown.exit_code == 0
    assert "control tokens" in shown.output


def test_a_wrong_end_id_exits_with_2_and_says_what_was_expected(folder):
    path = folder / "target" / "grammar.yaml"
    grammar = yaml.safe_load(path.read_text())
    grammar["control"]["end"]["id"] = 99
    path.write_text(yaml.safe_dump(grammar))
    done = preflight(folder, "--json")
    assert done.exit_code == 2
    assert [check["name"] for check in checks_of(done)["P3"] if check["outcome"] == "failed"] == ["control end"]
    assert "nothing was spent" in done.stderr
    assert "99" in done.stderr


def test_a_stage_that_does_not_exist_exits_with_2(folder):
    done = CliRunner().invoke(app, ["preflight", str(folder / "recipe.yaml"), "--until", "nowhere"])
    assert done.exit_code == 2
    assert "nowhere" in done.stderr


def test_online_every_endpoint_is_asked(folder):
    done = preflight(folder, "--online", "--json")
    assert done.exit_code == 0, done.output
    checks = checks_of(done)
    assert [check["name"] for check in checks["P10"]] == ["endpoint plain/bf16", "endpoint spacer/bf16"]
    assert all(check["outcome"] == "passed" for check in checks["P10"])
    habits = {check["name"]: check["found"] for check in checks["P11"]}
    assert "head_space = keep" in habits["endpoint plain/bf16"]
    assert "head_space = strip" in habits["endpoint spacer/bf16"]
    assert {"P13", "P14", "P15"} <= checks.keys()


def test_online_is_not_tried_when_the_files_are_wrong(folder):
    (folder / "target" / "config.json").write_text('{"eos_token_id": 265, "vocab_size": 267}')
    done = preflight(folder, "--online", "--json")
    assert done.exit_code == 2
    assert "P10" not in checks_of(done)
    assert not (folder / "runs").exists()
