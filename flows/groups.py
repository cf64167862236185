"""Extraction on several machines: one flow run leads and hands out groups of rows as flow runs of their own.

The leader holds the run directory and waits; it watches files and locks, which tell the truth, and asks the server only
what became of the runs it made. A group whose machine died is handed out again.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import flow, get_client, get_run_logger
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelling, Crashed

from eagle3.artifacts import Stage
from eagle3.errors import ArtifactError, ConfigurationError
from eagle3.file_system import SEEN_WITHIN_S, leading
from eagle3.hidden_states import Division, claim_of_groups
from eagle3.progress import ProgressEvent
from flows.form import Overrides
from flows.jobs import job_of
from tasks.caching import fresh
from tasks.hidden_states import extract_hidden_states, extract_one_group
from tasks.job import Job, StageRef
from tasks.progress import TaskProgress

POLL_S = 3.0
RUNNING_GRACE_S = 30.0
"""A running group takes its lock within seconds."""
PENDING_GRACE_S = 300.0
"""A worker that took a run starts its process within a minute, or died."""
PAGE = 200
"""Most flow runs that the server tells of in one answer."""
MOST_TRIES = 3
"""Runs that one leader makes for one group before it gives up."""


def group_run_name() -> str:
    """Return what the flow run of a group is called; people count from 1."""
    return f"{flow_run.parameters['run']} group {flow_run.parameters['group'] + 1}"


@flow(name="extract-group", flow_run_name=group_run_name)
def extract_group(
    recipe: str,
    group: int,
    leader: str,
    run: str,
    overrides: Overrides = [],  # noqa: B006 - never changed
    run_root: str = "runs",
    home: str = ".eagle3",
) -> dict[str, Any]:
    """Extract one group of rows for a run that leads. Started by that run, not by people.

    Args:
        recipe: Path of the recipe file, as the worker sees it.
        group: Number of the group, from 0.
        leader: Note of the leader, which this machine must find in the run directory.
        run: Name of the run directory that the leader works on.
        overrides: Further recipe values.
        run_root: Folder that holds the run directories, or block:NAME of an "eagle3 storage root" block.
        home: Folder for converted targets.
    """
    job = job_of(recipe, overrides, None, run_root, home)
    if job.recipe.run_name != run:
        raise ConfigurationError(
            f"recipe {Path(recipe).name!r} on this machine makes run {job.recipe.run_name!r}, its leader works on "
            f"{run!r}: the files differ. Bring the same project to every machine."
        )
    return extract_one_group(job, group, leader)


def extract_in_groups(job: Job, target: str, upstream: StageRef) -> StageRef:
    """Extract the hidden states; a deployment's run hands them out when the recipe asks for several groups.

    Raises:
        ConfigurationError: No deployment of `extract-group` is in the recipe's pool.
        ArtifactError: A group failed, or was lost again and again.
    """
    if deployment.id and job.recipe.hidden_states.num_groups > 1:
        _lead(job, target)
    return fresh(extract_hidden_states, job, target, upstream)


class Verdict(Enum):
    """What the leader does about one group."""

    WAIT = auto()
    AGAIN = auto()
    """Nobody works on it any more."""
    LOST = auto()
    """As AGAIN, and the server does not know that the run is dead."""
    FAILED = auto()


def judge(state: StateType, *, is_held: bool, idle_s: float) -> Verdict:
    """Say what to do about a group that is not done.

    Args:
        state: Of its latest flow run.
        is_held: Whether a living process holds the group.
        idle_s: How long the run has been in this state while nobody held the group.
    """
    if is_held:
        return Verdict.WAIT
    if state is StateType.FAILED:
        return Verdict.FAILED
    if state in (StateType.CRASHED, StateType.CANCELLED):
        return Verdict.AGAIN
    if state is StateType.COMPLETED:
        return Verdict.AGAIN if idle_s > SEEN_WITHIN_S else Verdict.WAIT
    grace_s = {StateType.RUNNING: RUNNING_GRACE_S, StateType.PENDING: PENDING_GRACE_S}.get(state)
    return Verdict.LOST if grace_s is not None and idle_s > grace_s else Verdict.WAIT


@dataclass(kw_only=True)
class _GroupRun:
    """The latest flow run of one group."""

    id: UUID
    number: int
    """Counts the runs that were ever made for this group."""
    tries: int = 1
    """Runs that this leader made for it."""
    seen: tuple[StateType | None, bool] = (None, False)
    since: float = 0.0
    """When the group was first seen as in `seen`."""


class _Leader:
    """The groups of one stage and their flow runs."""

    def __init__(self, client: SyncPrefectClient, job: Job, division: Division, plan: str, leader_id: str) -> None:
        self._client = client
        self._job = job
        self._division = division
        self._plan = plan
        self._leader_id = leader_id
        self._deployment_id = _deployment_in(client, job.recipe.hidden_states.group_pool)
        self._runs: dict[int, _GroupRun] = {}

    def unfinished(self) -> list[int]:
        return [number for number in self._division.numbers if self._division.record(number, self._plan) is None]

    def hand_out(self, group: int) -> None:
        """Make a flow run for a group; one that an earlier leader made and that still lives is taken over."""
        earlier = self._runs.get(group)
        number = earlier.number + 1 if earlier else 1
        while (made := self._run(group, number)).state is not None and made.state.is_final():
            number += 1
        self._runs[group] = _GroupRun(id=made.id, number=number, tries=earlier.tries + 1 if earlier else 1)

    def look_after(self, groups: Sequence[int]) -> None:
        """Hand out again what was lost.

        Raises:
            ArtifactError: A group failed, or was lost too often.
        """
        found = {run.id: run for run in self._read(groups)}
        for group in groups:
            self._look_after(group, found.get(self._runs[group].id))

    def _look_after(self, group: int, found: FlowRun | None) -> None:
        run = self._runs[group]
        kind = found.state.type if found is not None and found.state is not None else StateType.CRASHED
        is_held = self._division.is_held(group)
        if run.seen != (kind, is_held):
            run.seen, run.since = (kind, is_held), time.monotonic()
        verdict = judge(kind, is_held=is_held, idle_s=time.monotonic() - run.since)
        if verdict is Verdict.WAIT or self._division.record(group, self._plan) is not None:
            return
        name = f"group {group + 1} of {self._division.count}"
        if verdict is Verdict.FAILED or run.tries >= MOST_TRIES:
            reason = found.state.message if found is not None and found.state is not None else "it is gone"
            raise ArtifactError(
                f"{name} of the hidden states ended as {kind.value} after {run.tries} tries: {reason} "
                "Correct what it says and start this run again; finished groups are kept."
            )
        if verdict is Verdict.LOST:
            self._client.set_flow_run_state(run.id, Crashed(message="Nobody holds the group: its process died."))
        get_run_logger().warning("%s was lost (%s); it is handed out again", name, kind.value)
        self.hand_out(group)

    def free_group(self, groups: Sequence[int]) -> int | None:
        """Return a group that nobody works on, the last one: workers begin with the first."""
        return next((group for group in reversed(groups) if not self._division.is_held(group)), None)

    def call_off(self) -> None:
        """Cancel the runs that have not ended."""
        for found in self._read(list(self._runs)):
            if found.state is not None and not found.state.is_final():
                self._client.set_flow_run_state(found.id, Cancelling(message="The run that led was stopped."))

    def _read(self, groups: Sequence[int]) -> list[FlowRun]:
        found: list[FlowRun] = []
        for start in range(0, len(groups), PAGE):
            ids = [self._runs[group].id for group in groups[start : start + PAGE]]
            found += self._client.read_flow_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids)), limit=PAGE
            )
        return found

    def _run(self, group: int, number: int) -> FlowRun:
        given = flow_run.parameters
        parameters = {
            "recipe": self._job.recipe_path,
            "group": group,
            "leader": self._leader_id,
            "run": self._job.recipe.run_name,
            "overrides": list(self._job.overrides),
            "run_root": given.get("run_root", self._job.run_root),
            "home": self._job.home,
        }
        made: Any = run_deployment(
            self._deployment_id,
            parameters=parameters,
            timeout=0,
            as_subflow=False,
            idempotency_key=f"{self._job.recipe.run_name}-{self._leader_id}-{group}-{number}",
        )
        return made


def _lead(job: Job, target: str) -> None:
    """Hand out every group and wait until all are done.

    A run that sits in the pool of the groups works on them as well: with one worker it would wait for itself.
    """
    claim = claim_of_groups(job.recipe, job.run, Path(target))
    if claim is None:
        return
    division = Division(job.run.stage_path(Stage.HIDDEN_STATES), job.recipe.hidden_states.num_groups)
    with get_client(sync_client=True) as client, leading(division.folder, claim) as note, TaskProgress(job) as progress:
        leader = _Leader(client, job, division, claim["plan"], note.id)
        works_too = _pool_of_this_run(client) == job.recipe.hidden_states.group_pool
        for group in leader.unfinished():
            leader.hand_out(group)
        try:
            while left := leader.unfinished():
                done = division.count - len(left)
                progress(
                    ProgressEvent(stage="hidden_states", label="groups", done=done, total=division.count, unit="groups")
                )
                leader.look_after(left)
                own = leader.free_group(left) if works_too else None
                if own is None:
                    time.sleep(POLL_S)
                else:
                    extract_one_group(job, own, note.id)
        except BaseException:
            leader.call_off()
            raise


def _deployment_in(client: SyncPrefectClient, pool: str) -> UUID:
    found = client.read_deployments(
        flow_filter=FlowFilter(name=FlowFilterName(any_=["extract-group"])),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
    )
    if not found:
        raise ConfigurationError(
            f"no deployment of 'extract-group' is in work pool {pool!r}, which hidden_states.group_pool names. Run "
            "'eagle3 deploy', or add one for that pool to prefect.yaml first."
        )
    return found[0].id


def _pool_of_this_run(client: SyncPrefectClient) -> str | None:
    return client.read_deployment(UUID(str(deployment.id))).work_pool_name
