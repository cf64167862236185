import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3.cli import app
from eagle3.stages import ORDER

runner = CliRunner()

RECIPE = """
name: unit
target: {name: T, weights: {kind: directory, path: .}, grammar: smollm}
prompts: {datasets: [{name: code, path: code.jsonl}]}
generation: {provider: {kind: openrouter, model: m/m}, budget_usd: 1}
"""


@pytest.mark.parametrize("command", ["run", "plan", *(stage.command for stage in ORDER)])
def test_a_typo_in_a_key_exits_with_2_names_the_field_and_writes_nothing(tmp_path: Path, command: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("budget_usd", "buget_usd"))
    done = runner.invoke(app, [command, str(recipe), "--run-root", str(tmp_path / "runs")])
    assert done.exit_code == 2
    assert "generation.buget_usd: unknown key" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_missing_recipe_exits_with_2(tmp_path: Path) -> None:
    done = runner.invoke(app, ["run", str(tmp_path / "nothing.yaml")])
    assert done.exit_code == 2
    assert "cannot be read" in done.stderr


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    recipe, blocked = tmp_path / "recipe.yaml", tmp_path / "blocked"
    recipe.write_text(RECIPE)
    (tmp_path / "config.json").write_text("{}")
    blocked.touch()
    done = runner.invoke(app, ["prompts", str(recipe), "--run-root", str(blocked)])
    assert done.exit_code == 1
    assert done.stderr.startswith("NotADirectoryError: ")
    assert "blocked" in done.stderr
    assert "run the same command" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_stage_name_lists_the_known_ones(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    done = runner.invoke(app, ["run", str(recipe), "--until", "reconstuct"])
    assert done.exit_code == 2
    assert "reconstruct" in done.stderr


@pytest.mark.parametrize("command", ["status", "report"])
@pytest.mark.parametrize("place", ["nowhere", "."])
def test_a_folder_that_is_no_run_exits_with_2_and_stays_as_it_was(tmp_path: Path, command: str, place: str) -> None:
    done = runner.invoke(app, [command, str(tmp_path / place)])
    assert done.exit_code == 2
    assert "is no run directory" in done.stderr
    assert not list(tmp_path.iterdir())


def test_status_of_an_empty_run_is_json_for_programs(tmp_path: Path) -> None:
    (tmp_path / "1-prompts").mkdir()
    done = runner.invoke(app, ["status", str(tmp_path), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)


def test_every_command_has_help() -> None:
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        if name == "simulate":
            continue
        done = runner.invoke(app, [name, "--help"])
        assert done.exit_code == 0, name
        assert "Usage" in done.stdout
