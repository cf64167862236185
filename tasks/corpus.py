"""Task: corpus."""

from pathlib import Path

from prefect import task

from eagle3.artifacts import Stage
from eagle3.stages import run_stage
from tasks.caching import STAGE_OPTIONS
from tasks.job import Job, StageRef
from tasks.progress import TaskProgress


@task(name="corpus", task_run_name="corpus", **STAGE_OPTIONS)
def assemble_corpus(job: Job, target: str, upstream: StageRef) -> StageRef:
    """Merge, cap, split and shuffle what the audit kept."""
    del upstream  # read from disk; named so that the cache key and the graph know it
    with TaskProgress(job) as progress:
        return StageRef.of(run_stage(Stage.CORPUS, job.recipe, job.run, Path(target), progress))
