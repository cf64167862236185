"""What tests that operate a deployment through its face share: a look-alike that takes its time, a recipe file."""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterType,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import Artifact

from eagle3.recipe import load_recipe
from eagle3.simulator.process import SimulatorProcess
from tests.e2e.command_line import RECIPE
from tests.e2e.deployed import ANSWERS, SCENARIO, Deployed, provider_of

DATASETS = 3


@pytest.fixture(scope="module")
def look_alike() -> Generator[SimulatorProcess]:
    """A look-alike whose answers take a second or two, so that people have something to watch."""
    with SimulatorProcess(SCENARIO, [ANSWERS]) as process:
        yield process


def write_recipe(path: Path, look_alike: SimulatorProcess, samples: int, values: Sequence[str] = ()) -> Path:
    """Write a recipe as a person would have it: everything in the file, nothing in the form but its path."""
    overrides = [
        f"generation.provider={provider_of(look_alike)}",
        f"prompts.shard_samples={samples // DATASETS // 2}",
        "generation.stop_grace_s=5",
        *(f"prompts.datasets.{index}.max_samples={samples // DATASETS}" for index in range(DATASETS)),
        *values,
    ]
    wanted = load_recipe(RECIPE, overrides)
    written = wanted.model_dump(mode="json")
    written["name"] = path.stem
    for dataset in written["prompts"]["datasets"]:
        dataset["path"] = str(wanted.resolve(Path(dataset["path"])))
    path.write_text(yaml.safe_dump(written))
    return path


def change_recipe(path: Path, section: str, **values: Any) -> None:
    """Edit one section of a recipe file, as a person would between two attempts."""
    written = yaml.safe_load(path.read_bytes())
    written[section].update(values)
    path.write_text(yaml.safe_dump(written))


def artifacts_of(deployed: Deployed, run: Any, kind: str) -> dict[str, Artifact]:
    """Return the newest artifacts of a kind that a run made, by key."""
    with deployed.client() as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[run]), type=ArtifactFilterType(any_=[kind])
            ),
            limit=200,
        )
    return {str(artifact.key): artifact for artifact in sorted(found, key=lambda one: str(one.created))}


def log_lines_of(deployed: Deployed, run: Any) -> list[str]:
    """Return what the log of a run says, at most 200 lines."""
    with deployed.client() as client:
        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run])), limit=200)
    return [log.message for log in logs]
