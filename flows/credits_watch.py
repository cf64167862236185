"""Every few minutes: continue the runs whose credits were topped up."""

from typing import Any

from prefect import flow, get_client, get_run_logger
from prefect.client.schemas.objects import StateType
from prefect.events import emit_event

from eagle3.errors import Eagle3Error
from flows.pauses import AWAITING_CREDITS
from flows.waiting_runs import may_resume, readable, runs_in_state, schedule_again
from tasks.credits import Credit, find_credit
from tasks.key_block import key_in_environment


@flow(name="credits-watch", flow_run_name="credits watch")
def credits_watch() -> dict[str, Any]:
    """Continue every run that waits for credits and can pay again; the same run goes on.

    The key endpoint is asked first; then one sample of the waiting run is bought, through its journal and under its
    budget. Running this twice, or beside the Resume button, continues a run once.
    """
    logger = get_run_logger()
    outcomes: dict[str, str] = {}
    with get_client(sync_client=True) as client:
        for run in runs_in_state(client, StateType.PAUSED, name=AWAITING_CREDITS):
            job = readable(run)
            if job is None or run.state is None or not may_resume(run):
                outcomes[run.name] = "left alone"
                continue
            try:
                with key_in_environment(job, str(run.parameters.get("key_block", ""))):
                    credit = find_credit(job)
            except Eagle3Error as exc:
                logger.warning("run %r cannot be looked at: %s", run.name, exc)
                outcomes[run.name] = type(exc).__name__
                continue
            outcomes[run.name] = credit.value
            if credit is Credit.AVAILABLE and schedule_again(client, run.id, run.state, "credits were topped up"):
                outcomes[run.name] = "resumed"
                emit_event(
                    event="eagle3.credits.toppedup", resource={"prefect.resource.id": f"prefect.flow-run.{run.id}"}
                )
    logger.info("waiting runs: %s", outcomes or "none")
    return outcomes
