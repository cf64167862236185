"""Several machines extract hidden states: two workers with homes and working directories of their own share a storage.

One machine dies in the middle of a group; the others finish; the states are those that one machine computes.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.schemas.actions import BlockDocumentCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import FlowRun

from eagle3.artifacts import RunDirectory, Stage
from eagle3.hidden_states import Division
from eagle3.simulator.process import SimulatorProcess
from tests.e2e.command_line import RECIPE, overrides
from tests.e2e.deployed import (
    KEY_BLOCK,
    OPERATIONS_ONLY,
    Deployed,
    kill,
    look_alike,  # noqa: F401 - fixture
    settings,
    until,
)

# ruff: noqa: F811 - fixtures are imported
pytestmark = [pytest.mark.slow, OPERATIONS_ONLY]

GROUPS = 3
SAMPLES = 12
EXTRACTION = [
    "hidden_states.num_threads=1",  # two threads round otherwise than one
    "hidden_states.dtype=float32",
    "hidden_states.batch_tokens=512",
    "hidden_states.gate_samples=6",
    "hidden_states.min_target_agreement=0.5",
]


def group_runs(deployed: Deployed) -> list[FlowRun]:
    with deployed.client() as client:
        name = DeploymentFilter(name=DeploymentFilterName(any_=["extract-group"]))
        return client.read_flow_runs(deployment_filter=name, limit=200)


def make_storage_block(deployed: Deployed, name: str, root: Path) -> None:
    with deployed.client() as client:
        kind = client.read_block_type_by_slug("eagle3-storage-root")
        schema = client.get_most_recent_block_schema_for_block_type(kind.id)
        assert schema is not None
        client.create_block_document(
            BlockDocumentCreate(name=name, data={"path": str(root)}, block_schema_id=schema.id, block_type_id=kind.id)
        )


def lead(deployed: Deployed, storage: Path, wanted: Sequence[str]) -> UUID:
    """Start a run up to the hidden states; every machine finds the storage by a block."""
    deployed.roots.append(storage)
    return deployed.start(
        "pipeline",
        recipe=str(RECIPE),
        until="extract",
        run_root="block:test-storage",
        home=str(deployed.line.home),
        key_block=KEY_BLOCK,
        overrides=list(wanted),
    )


def test_a_machine_dies_and_another_takes_its_group(
    deployed: Deployed, look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    make_storage_block(deployed, "test-storage", storage)
    wanted = [*settings(look_alike, samples=SAMPLES), *EXTRACTION]
    kill([deployed.workers()["eagle3-gpu"]])
    machines = [deployed.start_worker("eagle3-gpu", f"gpu-{name}", tmp_path / name) for name in ("one", "two")]
    leader = lead(deployed, storage, [*wanted, f"hidden_states.num_groups={GROUPS}"])
    until(lambda: list(storage.glob(f"*/{Stage.CORPUS}/manifest.json")) != [], "the corpus is made", 240)
    run = RunDirectory((storage / "latest").resolve())
    alone = RunDirectory(tmp_path / "alone" / run.path.name)
    for stage in (Stage.PROMPTS, Stage.COMPLETIONS, Stage.CORPUS):
        shutil.copytree(run.stage_path(stage), alone.stage_path(stage))

    division = Division(run.stage_path(Stage.HIDDEN_STATES), GROUPS)
    until(lambda: sum(map(division.is_held, division.numbers)) == 2, "both machines work, each on its own group", 240)
    victims = [found for found in group_runs(deployed) if found.state_name == "Running"]
    first = next(found for found in victims if deployed.parent_of_flow(found.id) == machines[0].pid)
    kill([machines[0].pid, *deployed.flow_processes(first.id)])

    deployed.wait(leader, "Completed", timeout_s=600)
    deployed.line.json("extract", str(RECIPE), "--run-root", str(tmp_path / "alone"), "--json", *overrides(wanted))
    assert run.sealed(Stage.HIDDEN_STATES).digest == alone.sealed(Stage.HIDDEN_STATES).digest
    made = group_runs(deployed)
    assert len(made) == GROUPS + 1, "every group once, and the lost one again"
    lost = deployed.read(first.id)
    assert lost.state is not None
    assert lost.state.is_crashed()
