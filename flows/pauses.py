"""How a run that stopped on purpose is told to Prefect, and what a person gave it when it was resumed."""

import json
import signal
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State, StateDetails
from prefect.client.schemas.responses import SetStateStatus
from prefect.events import emit_event
from prefect.exceptions import Abort, Pause
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from prefect.states import Failed, Paused
from pydantic import Field, TypeAdapter

from eagle3.errors import AuditFailedError, BudgetReachedError, CreditsExhaustedError, PausedError, StoppedError
from tasks.job import Job

AWAITING_CREDITS = "AwaitingCredits"
BUDGET_REACHED = "BudgetReached"
AUDIT_FAILED = "AuditFailed"
PAUSE_TIMEOUT_S = 30 * 24 * 3600
"""A run waits a month before Prefect gives it up."""
_INPUT_PREFIX = "budget-"
_MOST_INPUTS = 200
"""Inputs of one run that are read; each pause leaves three."""


class RaiseBudget(RunInput):
    """What the Resume dialog asks when the budget is spent."""

    new_budget_usd: float = Field(gt=0, le=100_000, description="Hard budget of the whole run, in US dollars.")
    note: str = Field(default="", description="Why, for those who read the run later.")


_ANSWER = TypeAdapter(RaiseBudget)


def stopped_state(error: PausedError, job: Job) -> State[Any]:
    """Return the state a flow run ends in when it stopped on purpose, or leave it waiting.

    A run of a deployment waits as Paused without a process: `AwaitingCredits` until the Resume button or the credits
    watcher continues it, `BudgetReached` until somebody resumes it with a higher budget. A run started by hand ends as
    Failed under the same name; starting it again continues it.

    Call this with the run directory unlocked: a waiting run can be resumed before its process has ended.

    Raises:
        Pause: The run waits; Prefect ends the process.
        Abort: Somebody pressed Cancel. The worker makes the run Cancelled once the process is gone: if the run said so
            itself, a quick Retry would be undone by the worker.
    """
    name = _name_of(error)
    emit_event(
        event=f"eagle3.run.{name}",
        resource={"prefect.resource.id": f"eagle3.run.{job.recipe.run_name}", "prefect.resource.name": job.recipe.name},
        payload={"reason": str(error)},
    )
    if not deployment.id:
        return Failed(name=name, message=str(error), data=error)
    if isinstance(error, StoppedError):
        if _is_being_cancelled():
            raise Abort(str(error))
        signal.raise_signal(signal.SIGTERM)  # the worker ends; Prefect's own handler tells the server
        return Failed(name=name, message=str(error), data=error)
    return _wait(name, error, job)


def _wait(name: str, error: PausedError, job: Job) -> State[Any]:
    """Put this flow run to Paused and end its process; returns a state only when the server did not accept that."""
    run_id = UUID(str(flow_run.id))
    key = f"{datetime.now(UTC):%Y%m%d%H%M%S%f}"  # a key that was used before is refused as already fired
    asks = isinstance(error, BudgetReachedError)
    keyset = {part: f"{_INPUT_PREFIX}{key}-{part}" for part in ("description", "response", "schema")}
    waiting = Paused(
        name=name,
        message=str(error),
        reschedule=True,
        timeout_seconds=PAUSE_TIMEOUT_S,
        pause_key=key,
        state_details=StateDetails(run_input_keyset=keyset if asks else None).model_dump(exclude_none=True),
    )
    with get_client(sync_client=True) as client:
        answer = client.set_flow_run_state(run_id, waiting)
        if answer.status is not SetStateStatus.ACCEPT:
            if _is_being_cancelled():
                raise Abort(str(error))
            return Failed(name=name, message=str(error), data=error)
        if asks:
            _ask_for_budget(client, run_id, keyset, str(error), job)
    raise Pause(state=answer.state or waiting)


def failed_audit_state(error: AuditFailedError) -> State[Any]:
    """Return the state of a run that the audit ended; its name is what notifications listen for."""
    return Failed(name=AUDIT_FAILED, message=str(error), data=error)


def _ask_for_budget(client: SyncPrefectClient, run_id: UUID, keyset: dict[str, str], reason: str, job: Job) -> None:
    """Put the question of the Resume dialog beside a waiting flow run.

    It must wait already: the server forgets what lies under the keys of a pause at the moment it accepts the pause.
    """
    schema = RaiseBudget.model_json_schema()
    schema["properties"]["new_budget_usd"]["default"] = 2 * float(job.recipe.generation.budget_usd)
    text = f"{reason}\n\nA top-up alone never raises the budget. The new one holds for the whole run."
    client.create_flow_run_input(run_id, keyset["schema"], json.dumps(schema))
    client.create_flow_run_input(run_id, keyset["description"], json.dumps(text))


def granted_budget_usd(run_id: UUID | str) -> Decimal | None:
    """Return the highest budget that somebody gave a flow run when resuming it, or None."""
    with get_client(sync_client=True) as client:
        inputs = client.filter_flow_run_input(UUID(str(run_id)), _INPUT_PREFIX, _MOST_INPUTS, set())
    answers = [_ANSWER.validate_json(entry.value) for entry in inputs if entry.key.endswith("-response")]
    return max((Decimal(str(answer.new_budget_usd)) for answer in answers), default=None)


def _is_being_cancelled() -> bool:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(str(flow_run.id))).state
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def _name_of(error: PausedError) -> str:
    if isinstance(error, CreditsExhaustedError):
        return AWAITING_CREDITS
    return "Stopped" if isinstance(error, StoppedError) else BUDGET_REACHED
