"""Tasks: train, evaluate, export."""

from pathlib import Path

from prefect import task

from eagle3.artifacts import Stage
from eagle3.stages import run_stage
from tasks.caching import STAGE_OPTIONS
from tasks.job import Job, StageRef
from tasks.progress import TaskProgress


@task(name="train", task_run_name="train", **STAGE_OPTIONS)
def train_draft(job: Job, target: str, upstream: StageRef) -> StageRef:
    """Train the draft in a process of its own; success is judged by its final checkpoint."""
    del upstream  # read from disk; named so that the cache key and the graph know it
    with TaskProgress(job) as progress:
        return StageRef.of(run_stage(Stage.DRAFT, job.recipe, job.run, Path(target), progress))


@task(name="evaluate", task_run_name="evaluate", **STAGE_OPTIONS)
def evaluate_draft(job: Job, target: str, upstream: StageRef) -> StageRef:
    """Measure acceptance on held-out prompts, beside an untrained draft."""
    del upstream
    with TaskProgress(job) as progress:
        return StageRef.of(run_stage(Stage.EVALUATION, job.recipe, job.run, Path(target), progress))


@task(name="export", task_run_name="export", **STAGE_OPTIONS)
def export_draft(job: Job, target: str, upstream: StageRef) -> StageRef:
    """Write the draft for the engines of the recipe and check it tensor by tensor."""
    del upstream
    with TaskProgress(job) as progress:
        return StageRef.of(run_stage(Stage.EXPORT, job.recipe, job.run, Path(target), progress))
