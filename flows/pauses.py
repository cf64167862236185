"""How a run that stopped on purpose is told to Prefect, and what a person gave it when it was resumed."""

import json
import signal
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.objects import State, StateDetails
from prefect.events import emit_event
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Failed, Paused
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
    """Return the state a flow run ends in when it stopped on purpose.

    A run of a deployment waits as Paused without a process: `AwaitingCredits` until the Resume button or the credits
    watcher continues it, `BudgetReached` until somebody resumes it with a higher budget. Somebody's Cancel ends it as
    Cancelled. A run started by hand ends as Failed under the same name; starting it again continues it.
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
            return Cancelled(message=str(error))
        signal.raise_signal(signal.SIGTERM)  # the worker ends; Prefect's own handler tells the server
        return Failed(name=name, message=str(error), data=error)
    key = f"{datetime.now(UTC):%Y%m%d%H%M%S%f}"  # a key that was used before is refused as already fired
    if not isinstance(error, BudgetReachedError):
        return Paused(
            name=name, message=str(error), reschedule=True, timeout_seconds=PAUSE_TIMEOUT_S, pause_key=f"credits-{key}"
        )
    keyset = ask_for_budget(UUID(str(flow_run.id)), f"{_INPUT_PREFIX}{key}", str(error), job)
    return Paused(
        name=name,
        message=str(error),
        reschedule=True,
        timeout_seconds=PAUSE_TIMEOUT_S,
        pause_key=f"{_INPUT_PREFIX}{key}",
        state_details=StateDetails(run_input_keyset=keyset).model_dump(exclude_none=True),
    )


def failed_audit_state(error: AuditFailedError) -> State[Any]:
    """Return the state of a run that the audit ended; its name is what notifications listen for."""
    return Failed(name=AUDIT_FAILED, message=str(error), data=error)


def ask_for_budget(run_id: UUID, key: str, reason: str, job: Job) -> dict[str, str]:
    """Put the question of the Resume dialog beside a flow run; returns under which keys.

    The client is called directly: `RunInput.save` leaves nothing on the server when called from a flow that ends.
    """
    keyset = {part: f"{key}-{part}" for part in ("description", "response", "schema")}
    schema = RaiseBudget.model_json_schema()
    schema["properties"]["new_budget_usd"]["default"] = 2 * float(job.recipe.generation.budget_usd)
    text = f"{reason}\n\nA top-up alone never raises the budget. The new one holds for the whole run."
    with get_client(sync_client=True) as client:
        client.create_flow_run_input(run_id, keyset["schema"], json.dumps(schema))
        client.create_flow_run_input(run_id, keyset["description"], json.dumps(text))
    return keyset


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
