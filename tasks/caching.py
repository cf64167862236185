"""How stage tasks are cached and retried.

Prefect's cache is the fast path; the manifest on disk is the truth. `fresh` therefore runs a task again when the cached
reference no longer matches the disk.
"""

from pathlib import Path
from typing import Any

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext

from eagle3.artifacts import SCHEMA_VERSION
from eagle3.errors import Eagle3Error
from eagle3.records import canonical_json, sha256_text
from tasks.job import Job, StageRef


def stage_cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """Name a result by all that shapes it: schema, run, recipe, the files the run reads, upstream digest.

    File contents are in it because a prompt file, a grammar or a target edited in place must reach the drift check of
    its stage instead of a remembered reference.
    """
    job: Job = parameters["job"]
    upstream: StageRef | None = parameters.get("upstream")
    target: str | None = parameters.get("target")
    parts = [
        SCHEMA_VERSION,
        str(job.run.path),
        job.recipe.identity(),
        job.file_digests(Path(target) if target else None),
        upstream.digest if upstream else None,
    ]
    return f"eagle3-{context.task.name}-{sha256_text(canonical_json(parts))}"


async def is_retryable(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Let the error itself say whether running the same call again can help.

    It must be async: called synchronously, `state.result` would give a coroutine, which is always true.
    """
    del task, task_run
    found = await state.aresult(raise_on_failure=False)
    return isinstance(found, Eagle3Error) and found.retryable


def fresh(task: Task[..., StageRef], job: Job, *arguments: Any) -> StageRef:
    """Call a stage task; when its cached reference does not match the disk, run it for real."""
    reference = task(job, *arguments)
    if reference.is_current(job.run):
        return reference
    return task.with_options(refresh_cache=True)(job, *arguments)


STAGE_OPTIONS: dict[str, Any] = {
    "persist_result": True,
    "result_serializer": "json",
    "cache_key_fn": stage_cache_key,
    "retries": 2,
    "retry_delay_seconds": [10, 60],
    "retry_condition_fn": is_retryable,
}
"""Options of every stage task. Bodies that spend money also retry inside, per request."""
