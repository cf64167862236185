"""Artifacts about money and quality: spend per dataset and provider, plan beside actual, the audit's verdict."""

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext, TaskRunContext

from eagle3.errors import AuditFailedError
from tasks.job import Job
from tasks.progress import artifact_key

Rows = list[dict[str, Any]]


def publish_spend(job: Job, stats: Mapping[str, Any]) -> None:
    """Show what was spent: a table per dataset and one per provider, each with its total; outside of a run do nothing.

    Args:
        job: Names the artifacts.
        stats: Of the completions stage, finished or not.
    """
    if FlowRunContext.get() is None:
        return
    create_table_artifact(
        table=spend_rows(stats, "datasets", "dataset"),
        key=artifact_key("spend", job.recipe.name, "datasets"),
        description=plan_line(stats),
    )
    create_table_artifact(
        table=spend_rows(stats, "by_provider", "provider"),
        key=artifact_key("spend", job.recipe.name, "providers"),
        description=plan_line(stats),
    )


def spend_rows(stats: Mapping[str, Any], group: str, title: str) -> Rows:
    """Return one row per dataset or provider, and the total; money as text, exactly as in the books."""
    rows: Rows = [
        {
            title: name,
            "answers": values.get("samples", 0),
            "failed": values.get("failed", 0),
            "completion tokens": values.get("completion_tokens", 0),
            "USD": _plain(values.get("cost_usd", "0")),
        }
        for name, values in stats.get(group, {}).items()
    ]
    total = {
        title: "all",
        "answers": stats.get("samples", 0),
        "failed": stats.get("failed", 0),
        "completion tokens": stats.get("completion_tokens", 0),
        "USD": _plain(stats.get("spent_usd", "0")),
    }
    return [*rows, total]


def plan_line(stats: Mapping[str, Any]) -> str:
    """Say in one line how spend, plan and budget compare."""
    planned = stats.get("planned_usd") or {}
    expected, worst = (_plain(planned.get(case, "unknown")) for case in ("expected", "worst"))
    spent, budget, held = (_plain(stats.get(key, "unknown")) for key in ("spent_usd", "budget_usd", "held_usd"))
    return (
        f"spent ${spent} of the budget of ${budget}; planned ${expected} expected, ${worst} at worst; ${held} held for "
        "requests whose fate is open"
    )


def _plain(amount: str) -> str:
    """Write an amount of the books exactly, without the zeros at its end; words stay as they are."""
    try:
        return f"{Decimal(amount).normalize():f}"
    except InvalidOperation:
        return amount


def publish_verdict(job: Job, stats: Mapping[str, Any]) -> None:
    """Show the verdict of a passed audit and what it found."""
    counts: Mapping[str, Any] = stats.get("counts") or {}
    found = "\n".join(f"| {rule} | {count} |" for rule, count in sorted(counts.items())) or "| none | 0 |"
    _publish_verdict(
        job,
        f"**{stats.get('verdict', 'unknown')}**: {stats.get('kept', 0)} kept, {stats.get('dropped', 0)} dropped."
        f"\n\n| rule | findings |\n|---|---|\n{found}\n",
    )


def publish_failed_verdict(job: Job, error: AuditFailedError) -> None:
    """Show why the audit ended the run."""
    _publish_verdict(job, f"**failed**: {error}\n\nThe findings are in `4-audit/report.html` of the run directory.\n")


def _publish_verdict(job: Job, text: str) -> None:
    if TaskRunContext.get() is None and FlowRunContext.get() is None:
        return
    create_markdown_artifact(
        markdown=f"# Audit of {job.recipe.run_name}\n\n{text}",
        key=artifact_key("audit", job.recipe.name),
        description="May this run be trained on?",
    )
