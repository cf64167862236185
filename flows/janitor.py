"""Every few minutes: tidy up after processes that died without a word, and continue their runs."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from prefect import flow, get_client, get_run_logger
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Crashed
from pydantic import Field

from flows.attempt import AttemptRecord, attempts_of
from flows.waiting_runs import may_resume, readable, runs_in_state, schedule_again
from tasks.job import Job

FINAL = (StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CRASHED)
RECENT_RUNS = 50
"""Ended runs whose task runs are looked through at each call; older ones were looked at before."""


@flow(name="janitor", flow_run_name="janitor")
def janitor(
    grace_s: Annotated[float, Field(ge=1, le=600)] = 30.0, max_attempts: Annotated[int, Field(ge=1, le=20)] = 3
) -> dict[str, Any]:
    """Mark runs of dead processes as crashed, continue crashed runs, and end task runs that stayed behind as Running.

    Args:
        grace_s: Seconds for which nobody may hold a run's directory before its process counts as dead.
        max_attempts: Attempts after which a crashed run is left to a person.
    """
    with get_client(sync_client=True) as client:
        dead = _mark_dead_runs(client, grace_s)
        tasks = _end_leftover_tasks(client)
        resumed = _continue_crashed(client, max_attempts)
    found = {"marked_crashed": dead, "tasks_ended": tasks, "resumed": resumed}
    get_run_logger().info("janitor: %s", found)
    return found


def _mark_dead_runs(client: SyncPrefectClient, grace_s: float) -> list[str]:
    """A running flow holds the lock of its run directory; when nobody does, twice, its process is gone."""
    suspects = [run for run in runs_in_state(client, StateType.RUNNING) if _is_abandoned(run)]
    if not suspects:
        return []
    time.sleep(grace_s)
    dead: list[str] = []
    for run in suspects:
        now = client.read_flow_run(run.id)
        if now.state is None or run.state is None or now.state.id != run.state.id or not _is_abandoned(now):
            continue
        client.set_flow_run_state(
            run.id, Crashed(message="Nobody holds the run directory: the process of this run died."), force=False
        )
        dead.append(run.name)
    return dead


def _is_abandoned(run: FlowRun) -> bool:
    job = readable(run)
    if job is None or not _is_last_attempt_of(job, run):
        return False  # not on this machine, or not begun
    return not job.run.is_locked()


def _is_last_attempt_of(job: Job, run: FlowRun) -> bool:
    attempts = attempts_of(job.run)
    return bool(attempts) and attempts[-1].flow_run_id == str(run.id)


def _end_leftover_tasks(client: SyncPrefectClient) -> int:
    """Task runs of a killed process stay Running for ever, also when the run was continued: end them."""
    ended = sorted(runs_in_state(client, *FINAL), key=lambda run: run.end_time or datetime.min.replace(tzinfo=UTC))
    recent = [run.id for run in ended[-RECENT_RUNS:]]
    if not recent:
        return 0
    leftovers = client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=recent)),
        task_run_filter=TaskRunFilter(
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING]))
        ),
    )
    for task in leftovers:
        client.set_task_run_state(task.id, Crashed(message="The process of this task died."), force=True)
    return len(leftovers)


def is_worth_continuing(attempts: Sequence[AttemptRecord], run_id: str, max_attempts: int) -> bool:
    """Tell whether a crashed run began on this machine's storage and did not yet die too often."""
    died = [attempt for attempt in attempts if attempt.flow_run_id == run_id and not attempt.has_ended]
    return 0 < len(died) < max_attempts


def _continue_crashed(client: SyncPrefectClient, max_attempts: int) -> Sequence[str]:
    resumed: list[str] = []
    for run in runs_in_state(client, StateType.CRASHED):
        job = readable(run)
        if job is None or run.state is None or not may_resume(run):
            continue
        if job.run.is_locked() or not is_worth_continuing(attempts_of(job.run), str(run.id), max_attempts):
            continue  # somebody works there; perhaps a process that was only thought dead while the server was away
        if schedule_again(client, run.id, run.state, "its process died; continuing from the files"):
            resumed.append(run.name)
    return resumed
