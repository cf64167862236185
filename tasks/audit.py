"""Task: audit."""

from pathlib import Path

from prefect import task

from eagle3.artifacts import Stage
from eagle3.errors import AuditFailedError
from eagle3.stages import run_stage
from tasks.caching import STAGE_OPTIONS
from tasks.job import Job, StageRef
from tasks.progress import TaskProgress
from tasks.spend import publish_failed_verdict, publish_verdict


@task(name="audit", task_run_name="audit", **STAGE_OPTIONS)
def audit_samples(job: Job, target: str, upstream: StageRef) -> StageRef:
    """Check every sample against every rule; a critical finding ends the run here."""
    del upstream  # read from disk; named so that the cache key and the graph know it
    with TaskProgress(job) as progress:
        try:
            manifest = run_stage(Stage.AUDIT, job.recipe, job.run, Path(target), progress)
        except AuditFailedError as exc:
            publish_failed_verdict(job, exc)
            raise
        publish_verdict(job, manifest.stats)
        return StageRef.of(manifest)
