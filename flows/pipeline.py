"""The whole story: from a recipe to a draft model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from eagle3.artifacts import Stage
from eagle3.errors import AuditFailedError, PausedError
from eagle3.preflight import require_environment
from eagle3.stages import ORDER
from flows.attempt import attempt
from flows.form import BudgetUsd, Overrides, RedoName, StageName
from flows.groups import extract_in_groups
from flows.jobs import job_of
from flows.pauses import failed_audit_state, stopped_state
from tasks.audit import audit_samples
from tasks.caching import fresh
from tasks.completions import generate_completions
from tasks.corpus import assemble_corpus
from tasks.drafter import evaluate_draft, export_draft, train_draft
from tasks.job import Job, StageRef
from tasks.key_block import key_in_environment
from tasks.prompts import prepare_prompts, prepare_target_model
from tasks.report import publish_report
from tasks.token_samples import reconstruct_token_samples

Step = Callable[[Job, str, StageRef], StageRef]

STEPS: dict[Stage, Step] = {
    Stage.PROMPTS: lambda job, target, _: fresh(prepare_prompts, job, target),
    Stage.COMPLETIONS: generate_completions,
    Stage.TOKEN_SAMPLES: lambda *given: fresh(reconstruct_token_samples, *given),
    Stage.AUDIT: lambda *given: fresh(audit_samples, *given),
    Stage.CORPUS: lambda *given: fresh(assemble_corpus, *given),
    Stage.HIDDEN_STATES: extract_in_groups,
    Stage.DRAFT: lambda *given: fresh(train_draft, *given),
    Stage.EVALUATION: lambda *given: fresh(evaluate_draft, *given),
    Stage.EXPORT: lambda *given: fresh(export_draft, *given),
}
"""Every stage in order; each gets the reference of the one before it."""

SHARD_TASKS: Any = ThreadPoolTaskRunner(max_workers=12)
"""Shard tasks under way at once: enough that a slow last request of one shard leaves no request slot idle."""

NOTHING_YET = StageRef(stage="", digest="", num_samples=0, stats={})


def run_name() -> str:
    """Return what a flow run is called in the UI: its recipe, and its part of the road when it is only a part."""
    name = Path(str(flow_run.parameters["recipe"])).stem
    return name if flow_run.flow_name == "pipeline" else f"{flow_run.flow_name} {name}"


@flow(name="pipeline", flow_run_name=run_name, task_runner=SHARD_TASKS)
def pipeline(
    recipe: str,
    until: StageName = "export",
    redo: RedoName = "nothing",
    budget_usd: BudgetUsd = None,
    overrides: Overrides = [],  # noqa: B006 - never changed; an empty list is what the run form starts from
    key_block: str = "",
    run_root: str = "runs",
    home: str = ".eagle3",
    auto_resume: bool = True,  # noqa: FBT001, FBT002 - a switch of the run form
) -> dict[str, Any] | State[Any]:
    """Run a recipe from its prompts to an exported draft model, continuing where an earlier run stopped.

    Args:
        recipe: Path of the recipe file, as the worker sees it; relative paths start at the project.
        until: Last stage to make.
        redo: First stage to make anew; answers that were paid for are never made anew.
        budget_usd: Hard budget of the run in US dollars; None leaves it to the recipe.
        overrides: Further recipe values, one "section.key=value" each.
        key_block: Name of an "eagle3 API key" block; empty takes the key from the worker's environment.
        run_root: Folder that holds the run directories, or block:NAME of an "eagle3 storage root" block.
        home: Folder for converted targets.
        auto_resume: Whether the credits watcher and the janitor may continue this run.
    """
    del auto_resume  # read by the watcher and the janitor
    stages = ORDER[: 1 + [stage.command for stage in ORDER].index(until)]
    job = job_of(recipe, overrides, budget_usd, run_root, home)
    return run_stages(job, stages, redo=None if redo == "nothing" else redo, key_block=key_block)


def run_stages(
    job: Job, stages: Sequence[Stage], *, redo: str | None = None, key_block: str = ""
) -> dict[str, Any] | State[Any]:
    """Make consecutive stages of a run; those before the first must be sealed.

    Returns:
        What was made, or the state of a run that stopped on purpose.

    Raises:
        Eagle3Error: Something is wrong that waiting does not cure.
    """
    try:
        with attempt(job, redo) as made, key_in_environment(job, key_block):
            try:
                target, reference = prepare_target_model(job), _reference_before(job, stages[0])
                require_environment(job.recipe, job.run, Path(target), stages)
                for stage in stages:
                    with made.watching(stage):
                        reference = STEPS[stage](job, target, reference)
            finally:
                publish_report(job)
    except PausedError as exc:
        get_run_logger().warning("stopped: %s", exc)
        return stopped_state(exc, job)
    except AuditFailedError as exc:
        return failed_audit_state(exc)
    return made.result()


def _reference_before(job: Job, first: Stage) -> StageRef:
    number = ORDER.index(first)
    return StageRef.of(job.run.sealed(ORDER[number - 1])) if number else NOTHING_YET
