"""The whole story: from a recipe to a draft model."""

from collections.abc import Callable
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.task_runners import ThreadPoolTaskRunner

from eagle3.artifacts import Stage
from eagle3.errors import PausedError
from flows.attempt import attempt, paused_state
from tasks.audit import audit_samples
from tasks.caching import fresh
from tasks.completions import generate_completions
from tasks.corpus import assemble_corpus
from tasks.drafter import evaluate_draft, export_draft, train_draft
from tasks.hidden_states import extract_hidden_states
from tasks.job import Job, StageRef
from tasks.prompts import prepare_prompts, prepare_target_model
from tasks.report import publish_report
from tasks.token_samples import reconstruct_token_samples

Step = Callable[[Job, str, StageRef], StageRef]

STEPS: tuple[tuple[Stage, Step], ...] = (
    (Stage.PROMPTS, lambda job, target, _: fresh(prepare_prompts, job, target)),
    (Stage.COMPLETIONS, generate_completions),
    (Stage.TOKEN_SAMPLES, lambda *given: fresh(reconstruct_token_samples, *given)),
    (Stage.AUDIT, lambda *given: fresh(audit_samples, *given)),
    (Stage.CORPUS, lambda *given: fresh(assemble_corpus, *given)),
    (Stage.HIDDEN_STATES, lambda *given: fresh(extract_hidden_states, *given)),
    (Stage.DRAFT, lambda *given: fresh(train_draft, *given)),
    (Stage.EVALUATION, lambda *given: fresh(evaluate_draft, *given)),
    (Stage.EXPORT, lambda *given: fresh(export_draft, *given)),
)
"""Every stage in order; each gets the reference of the one before it."""

SHARD_TASKS: Any = ThreadPoolTaskRunner(max_workers=12)
"""Shard tasks under way at once: enough that a slow last request of one shard leaves no request slot idle."""

NOTHING_YET = StageRef(stage="", digest="", num_samples=0, stats={})


@flow(name="pipeline", flow_run_name="{recipe}", task_runner=SHARD_TASKS)
def pipeline(
    recipe: str,
    overrides: list[str] | None = None,
    run_root: str = "runs",
    home: str = ".eagle3",
    until: str | None = None,
    redo: str | None = None,
) -> dict[str, Any] | State[Any]:
    """Run a recipe from its prompts to an exported draft model, continuing where an earlier run stopped.

    Args:
        recipe: Path of the recipe file, as the worker sees it.
        overrides: `section.key=value` pairs laid over the recipe.
        run_root: Folder that holds the run directories.
        home: Folder for converted targets.
        until: Last stage to make, by its command name, for example `audit`; unset makes all.
        redo: First stage to make anew, by its command name; answers already paid for are never made anew.
    """
    job = Job(recipe_path=recipe, overrides=tuple(overrides or ()), run_root=run_root, home=home)
    with attempt(job, redo) as made:
        try:
            target, reference = prepare_target_model(job), NOTHING_YET
            for stage, step in STEPS:
                with made.watching(stage):
                    reference = step(job, target, reference)
                if until == stage.command:
                    break
        except PausedError as exc:
            get_run_logger().warning("paused: %s", exc)
            return paused_state(exc)
        finally:
            publish_report(job)
        return made.result()
