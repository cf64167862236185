"""Finding flow runs on the server and scheduling them again, without ever starting one twice."""

from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterTags,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.states import Scheduled

from eagle3.errors import ConfigurationError
from flows.jobs import job_of
from tasks.job import Job

TAG = "eagle3"
"""Carried by every deployment of this project."""
PAGE = 200


def runs_in_state(client: SyncPrefectClient, *kinds: StateType, name: str | None = None) -> list[FlowRun]:
    """Return this project's flow runs in the given states, oldest first."""
    names = FlowRunFilterStateName(any_=[name]) if name is not None else None
    wanted = FlowRunFilterState(type=FlowRunFilterStateType(any_=list(kinds)), name=names)
    found: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=wanted),
            deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG])),
            limit=PAGE,
            offset=len(found),
        )
        found += page
        if len(page) < PAGE:
            return sorted(found, key=lambda run: run.created or run.expected_start_time)  # pyright: ignore[reportArgumentType, reportCallIssue] - one of them is set


def job_of_run(run: FlowRun) -> Job | None:
    """Return what a flow run works on; None for flows without a recipe."""
    values: dict[str, Any] = run.parameters
    if "recipe" not in values:
        return None
    return job_of(
        values["recipe"],
        values.get("overrides", ()),
        values.get("budget_usd"),
        values.get("run_root", "runs"),
        values.get("home", ".eagle3"),
        run.id,
    )


def may_resume(run: FlowRun) -> bool:
    """Tell whether its owner lets others continue the run."""
    return bool(run.parameters.get("auto_resume", True))


def schedule_again(client: SyncPrefectClient, run_id: UUID, seen: State[Any], message: str) -> bool:
    """Schedule a run that is still in the state it was seen in; returns whether the server accepted it."""
    now = client.read_flow_run(run_id).state
    if now is None or now.id != seen.id:
        return False  # somebody was faster
    answer = client.set_flow_run_state(run_id, Scheduled(name="Resuming", message=message), force=False)
    return answer.status is SetStateStatus.ACCEPT


def readable(run: FlowRun) -> Job | None:
    """Return the job of a run whose recipe can be read here, else None."""
    try:
        job = job_of_run(run)
        if job is not None:
            job.recipe  # noqa: B018 - read here, because it may be missing or wrong on this machine
    except ConfigurationError:
        return None
    return job
