"""A cost plan as tables for a terminal."""

from decimal import Decimal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eagle3.generation.cost import CostPlan

_MTOK = Decimal(1_000_000)


def render_plan(plan: CostPlan) -> RenderableType:
    """Return the plan as something that `rich` prints: datasets, endpoints, totals, warnings."""
    datasets = Table(title="Datasets")
    datasets.add_column("dataset", overflow="fold", min_width=9)
    for name in ("samples", "done", "prompt tok", "max", "length", "expected $", "worst $"):
        datasets.add_column(name, justify="right", no_wrap=True)
    for cost in plan.datasets:
        datasets.add_row(
            cost.dataset,
            f"{cost.num_samples:,}",
            f"{cost.num_answered:,}",
            f"{cost.prompt_tokens:,}",
            f"{cost.max_tokens:,}",
            ("" if cost.is_length_known else "~") + f"{cost.expected_tokens_per_answer:,.0f}",
            _usd(cost.expected_usd),
            _usd(cost.worst_usd),
        )
    endpoints = Table(title="Endpoints")
    for name in ("endpoint", "precision", "prompt USD/M", "answer USD/M", "used"):
        endpoints.add_column(name, overflow="fold")
    for endpoint, reason in [*((entry, "yes") for entry in plan.endpoints), *plan.refused]:
        endpoints.add_row(
            endpoint.tag,
            endpoint.quantization or "unknown",
            f"{(endpoint.prompt_usd * _MTOK).normalize():f}",
            f"{(endpoint.completion_usd * _MTOK).normalize():f}",
            reason if reason == "yes" else f"no: {reason}",
        )
    totals = (
        f"expected {_usd(plan.expected_usd)} USD, worst {_usd(plan.worst_usd)} USD; budget {plan.budget_usd:f} USD, of "
        f"which {_usd(plan.spent_usd)} spent and {_usd(plan.held_usd)} held; it carries {plan.requests_at_once:,} "
        "requests at once"
    )
    if plan.watched_at_once is not None and plan.watched_at_once < plan.requests_at_once:
        totals += f"; the audit while generating lets {plan.watched_at_once:,} go out at once"
    warnings = [Text(f"warning: {warning}") for warning in plan.warnings]
    return Group(datasets, endpoints, Text(totals), *warnings)


def _usd(amount: Decimal) -> str:
    return f"{amount:,.2f}" if amount >= 1 or not amount else f"{amount:.6f}"
