"""Tasks: extract, in this process or as one group of several."""

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from eagle3.artifacts import Stage
from eagle3.errors import RunLockedError
from eagle3.file_system import check_file_system, require_leader
from eagle3.hidden_states import Division, extract_group
from eagle3.stages import run_stage
from eagle3.target import prepare_target
from tasks.caching import STAGE_OPTIONS
from tasks.job import Job, StageRef
from tasks.progress import TaskProgress


@task(name="extract", task_run_name="extract", **STAGE_OPTIONS)
def extract_hidden_states(job: Job, target: str, upstream: StageRef) -> StageRef:
    """Run the target over the corpus and keep the states the draft learns from."""
    del upstream  # read from disk; named so that the cache key and the graph know it
    with TaskProgress(job) as progress:
        return StageRef.of(run_stage(Stage.HIDDEN_STATES, job.recipe, job.run, Path(target), progress))


def group_task_name() -> str:
    """Return what the task run of a group is called; people count from 1."""
    return f"extract group {task_run.parameters['number'] + 1}"


@task(name="extract-group", task_run_name=group_task_name, retries=0, cache_policy=NO_CACHE)
def extract_one_group(job: Job, number: int, leader_id: str) -> dict[str, Any]:
    """Extract one group of rows for the run that leads; leaves the group alone when another process has it.

    The group is held from the first moment on, long before the target is loaded: that is how the leader knows that
    somebody is at work.
    """
    check_file_system(job.run.path.parent)
    division = Division(job.run.stage_path(Stage.HIDDEN_STATES), job.recipe.hidden_states.num_groups)
    require_leader(division.folder, leader_id)
    try:
        with division.holding([number]), TaskProgress(job, is_logged=False) as progress:
            target = prepare_target(job.recipe, Path(job.home) / "models")
            record = extract_group(job.recipe, job.run, target, number, leader_id, progress)
    except RunLockedError as exc:
        return {"left alone": str(exc)}
    return {"samples": len(record.shards), "computed_tokens": record.computed_tokens}
