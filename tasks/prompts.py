"""Task: target, tokenizer and prompts."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from eagle3.artifacts import Stage
from eagle3.stages import run_stage
from eagle3.target import prepare_target
from tasks.caching import STAGE_OPTIONS
from tasks.job import Job, StageRef
from tasks.progress import TaskProgress


@task(name="target", task_run_name="target", retries=0, cache_policy=NO_CACHE)
def prepare_target_model(job: Job) -> str:
    """Return the folder of the target model, converting it first when the recipe names a GGUF package."""
    return str(prepare_target(job.recipe, Path(job.home) / "models"))


@task(name="prompts", task_run_name="prompts", **STAGE_OPTIONS)
def prepare_prompts(job: Job, target: str) -> StageRef:
    """Read, check, deduplicate and shard the prompts."""
    with TaskProgress(job) as progress:
        return StageRef.of(run_stage(Stage.PROMPTS, job.recipe, job.run, Path(target), progress))
