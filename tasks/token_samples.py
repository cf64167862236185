"""Task: reconstruct."""

from pathlib import Path

from prefect import task

from eagle3.artifacts import Stage
from eagle3.stages import run_stage
from tasks.caching import STAGE_OPTIONS
from tasks.job import Job, StageRef
from tasks.progress import TaskProgress


@task(name="reconstruct", task_run_name="reconstruct", **STAGE_OPTIONS)
def reconstruct_token_samples(job: Job, target: str, upstream: StageRef) -> StageRef:
    """Rebuild the token ids of every answer, with proof."""
    del upstream  # read from disk; named so that the cache key and the graph know it
    with TaskProgress(job) as progress:
        return StageRef.of(run_stage(Stage.TOKEN_SAMPLES, job.recipe, job.run, Path(target), progress))
