"""What a flow run works on, from the values of its run form."""

from collections.abc import Sequence
from uuid import UUID

from prefect.runtime import deployment, flow_run

from flows.pauses import granted_budget_usd
from tasks.job import Job
from tasks.storage_block import resolve_run_root


def job_of(
    recipe: str,
    overrides: Sequence[str],
    budget_usd: float | None,
    run_root: str,
    home: str,
    run_id: UUID | str | None = None,
) -> Job:
    """Return the job of a flow run; a budget from the form counts, and one given at a resume counts more.

    Args:
        recipe: Path of the recipe file.
        overrides: `section.key=value` pairs.
        budget_usd: From the form.
        run_root: Folder that holds the run directories, or `block:NAME` of a storage root block.
        home: Folder for converted targets.
        run_id: The flow run; None means the one this code runs in.

    Raises:
        ConfigurationError: The storage root is not on this machine.
    """
    asked = run_id or (flow_run.id if deployment.id else None)
    granted = granted_budget_usd(asked) if asked else None
    budgets = [f"generation.budget_usd={value}" for value in (budget_usd, granted) if value is not None]
    return Job(recipe_path=recipe, overrides=(*overrides, *budgets), run_root=resolve_run_root(run_root), home=home)
