"""Parts of the pipeline as flows of their own, for runs whose stages belong on different machines.

Each continues the run directory of its recipe; what comes before must be sealed there.
"""

from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State

from eagle3.artifacts import Stage
from flows.form import BudgetUsd, Overrides
from flows.pipeline import SHARD_TASKS, job_of, run_name, run_stages

Result = dict[str, Any] | State[Any]


@flow(name="prepare", flow_run_name=run_name)
def prepare(
    recipe: str,
    overrides: Overrides = [],  # noqa: B006 - never changed; an empty list is what the run form starts from
    run_root: str = "runs",
    home: str = ".eagle3",
) -> Result:
    """Convert the target when needed, and read, check and shard the prompts. Costs nothing.

    Args:
        recipe: Path of the recipe file, as the worker sees it; relative paths start at the project.
        overrides: Further recipe values, one "section.key=value" each.
        run_root: Folder that holds the run directories.
        home: Folder for converted targets.
    """
    return _run((Stage.PROMPTS,), recipe, overrides, run_root, home)


@flow(name="generate", flow_run_name=run_name, task_runner=SHARD_TASKS)
def generate(
    recipe: str,
    budget_usd: BudgetUsd = None,
    overrides: Overrides = [],  # noqa: B006 - never changed; an empty list is what the run form starts from
    key_block: str = "",
    run_root: str = "runs",
    home: str = ".eagle3",
    auto_resume: bool = True,  # noqa: FBT001, FBT002 - a switch of the run form
) -> Result:
    """Buy the answers of a prepared run under its hard budget.

    Args:
        recipe: Path of the recipe file, as the worker sees it; relative paths start at the project.
        budget_usd: Hard budget of the run in US dollars; None leaves it to the recipe.
        overrides: Further recipe values, one "section.key=value" each.
        key_block: Name of an "eagle3 API key" block; empty takes the key from the worker's environment.
        run_root: Folder that holds the run directories.
        home: Folder for converted targets.
        auto_resume: Whether the credits watcher and the janitor may continue this run.
    """
    del auto_resume  # read by the watcher and the janitor
    return run_stages(job_of(recipe, overrides, budget_usd, run_root, home), (Stage.COMPLETIONS,), key_block=key_block)


@flow(name="reconstruct-audit", flow_run_name=run_name)
def reconstruct_audit(
    recipe: str,
    overrides: Overrides = [],  # noqa: B006 - never changed; an empty list is what the run form starts from
    run_root: str = "runs",
    home: str = ".eagle3",
) -> Result:
    """Rebuild the token ids of every answer and judge every sample.

    Args:
        recipe: Path of the recipe file, as the worker sees it; relative paths start at the project.
        overrides: Further recipe values, one "section.key=value" each.
        run_root: Folder that holds the run directories.
        home: Folder for converted targets.
    """
    return _run((Stage.TOKEN_SAMPLES, Stage.AUDIT), recipe, overrides, run_root, home)


@flow(name="corpus", flow_run_name=run_name)
def corpus(
    recipe: str,
    overrides: Overrides = [],  # noqa: B006 - never changed; an empty list is what the run form starts from
    run_root: str = "runs",
    home: str = ".eagle3",
) -> Result:
    """Merge, cap, split and shuffle what the audit kept.

    Args:
        recipe: Path of the recipe file, as the worker sees it; relative paths start at the project.
        overrides: Further recipe values, one "section.key=value" each.
        run_root: Folder that holds the run directories.
        home: Folder for converted targets.
    """
    return _run((Stage.CORPUS,), recipe, overrides, run_root, home)


@flow(name="extract", flow_run_name=run_name)
def extract(
    recipe: str,
    overrides: Overrides = [],  # noqa: B006 - never changed; an empty list is what the run form starts from
    run_root: str = "runs",
    home: str = ".eagle3",
) -> Result:
    """Run the target over the corpus and keep the states the draft learns from.

    Args:
        recipe: Path of the recipe file, as the worker sees it; relative paths start at the project.
        overrides: Further recipe values, one "section.key=value" each.
        run_root: Folder that holds the run directories.
        home: Folder for converted targets.
    """
    return _run((Stage.HIDDEN_STATES,), recipe, overrides, run_root, home)


@flow(name="train", flow_run_name=run_name)
def train(
    recipe: str,
    overrides: Overrides = [],  # noqa: B006 - never changed; an empty list is what the run form starts from
    run_root: str = "runs",
    home: str = ".eagle3",
) -> Result:
    """Train the draft.

    Args:
        recipe: Path of the recipe file, as the worker sees it; relative paths start at the project.
        overrides: Further recipe values, one "section.key=value" each.
        run_root: Folder that holds the run directories.
        home: Folder for converted targets.
    """
    return _run((Stage.DRAFT,), recipe, overrides, run_root, home)


@flow(name="evaluate-export", flow_run_name=run_name)
def evaluate_export(
    recipe: str,
    overrides: Overrides = [],  # noqa: B006 - never changed; an empty list is what the run form starts from
    run_root: str = "runs",
    home: str = ".eagle3",
) -> Result:
    """Measure acceptance on held-out prompts and write the draft for the engines of the recipe.

    Args:
        recipe: Path of the recipe file, as the worker sees it; relative paths start at the project.
        overrides: Further recipe values, one "section.key=value" each.
        run_root: Folder that holds the run directories.
        home: Folder for converted targets.
    """
    return _run((Stage.EVALUATION, Stage.EXPORT), recipe, overrides, run_root, home)


def _run(stages: Sequence[Stage], recipe: str, overrides: Sequence[str], run_root: str, home: str) -> Result:
    return run_stages(job_of(recipe, overrides, None, run_root, home), stages)
