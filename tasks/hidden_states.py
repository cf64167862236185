"""Task: extract."""

from pathlib import Path

from prefect import task

from eagle3.artifacts import Stage
from eagle3.stages import run_stage
from tasks.caching import STAGE_OPTIONS
from tasks.job import Job, StageRef
from tasks.progress import TaskProgress


@task(name="extract", task_run_name="extract", **STAGE_OPTIONS)
def extract_hidden_states(job: Job, target: str, upstream: StageRef) -> StageRef:
    """Run the target over the corpus and keep the states the draft learns from."""
    del upstream  # read from disk; named so that the cache key and the graph know it
    with TaskProgress(job) as progress:
        return StageRef.of(run_stage(Stage.HIDDEN_STATES, job.recipe, job.run, Path(target), progress))
