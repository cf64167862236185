"""The project as others meet it: recipes load, heavy libraries stay away, deployments are complete."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eagle3.recipe import load_recipe

PROJECT = Path(__file__).resolve().parents[2]
RECIPES = sorted((PROJECT / "deployments" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_load_and_name_files_that_exist(path: Path) -> None:
    recipe = load_recipe(path)
    for dataset in recipe.prompts.datasets:
        assert recipe.resolve(dataset.path).is_file()
    provider = recipe.generation.provider
    if provider.kind == "simulator":
        assert all(recipe.resolve(file).is_file() for file in (provider.scenario, *provider.answers))


@pytest.mark.parametrize(
    "module", ["eagle3.recipe", "eagle3.cli", "eagle3.generation", "eagle3.stages", "flows.pipeline"]
)
def test_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


def test_library_does_not_load_prefect() -> None:
    code = "import sys, eagle3.cli, eagle3.stages, eagle3.generation, eagle3.report; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_deployments_name_flows_and_recipes_that_exist() -> None:
    document = yaml.safe_load((PROJECT / "prefect.yaml").read_text())
    for deployment in document["deployments"]:
        place, _, name = deployment["entrypoint"].partition(":")
        assert f"def {name}(" in (PROJECT / place).read_text()
        if "parameters" in deployment:
            assert (PROJECT / deployment["parameters"]["recipe"]).is_file()


def test_docker_folder_holds_no_python() -> None:
    assert not list((PROJECT / "docker").rglob("*.py"))


def test_constraints_pin_every_requirement_exactly() -> None:
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in pin for pin in pins)
