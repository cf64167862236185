"""Status and summary for terminals: what rich can print, never printed here."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eagle3.report.reading import as_mapping, at, dollars, integer, number
from eagle3.report.status import RunStatus, Spend, StageRow, StageState

_STYLES: Mapping[StageState, str] = {
    StageState.COMPLETE: "green",
    StageState.PARTIAL: "yellow",
    StageState.PAUSED: "yellow",
    StageState.FAILED: "red",
    StageState.DRIFTED: "yellow",
    StageState.UNREADABLE: "red",
    StageState.NOT_STARTED: "dim",
}


def render_status(status: RunStatus) -> Text:
    """Return the status as text for terminals; `.plain` is the same without colours."""
    text = Text(f"run {status.run}" + (f" (recipe {status.recipe})" if status.recipe else "") + "\n\n")
    for row in status.stages:
        figures = [f"{shard_text(row)} shards"] if shard_text(row) else []
        figures += [f"{count:,} {unit}" for count, unit in ((row.samples, "samples"), (row.tokens, "tokens")) if count]
        text.append(f"  {row.stage.value:<16} ")
        text.append(f"{row.state.value:<12}", style=_STYLES[row.state])
        text.append(f" {', '.join(figures)}".rstrip() + "\n")
    if status.datasets:
        heads = f"{'prompts':>8} {'answered':>9} {'failed':>7} {'dropped':>8} {'cost':>12}"
        text.append(f"\n  {'dataset':<20} {heads}\n", style="dim")
    for entry in status.datasets:
        prompts = "-" if entry.prompts is None else f"{entry.prompts:,}"
        counts = f"{prompts:>8} {entry.answered:>9,} {entry.failed:>7,} {entry.dropped:>8,}"
        text.append(f"  {entry.dataset:<20} {counts} {usd(entry.cost_usd):>12}\n")
    text.append(f"\n  {_spend_line(status.spend)}\n")
    if status.failures:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in status.failures.items())
        text.append(f"  without an answer: {reasons}\n")
    for sentence in status.unfinished:
        text.append(f"  ! {sentence}\n", style="yellow")
    text.append("\n  complete" if status.is_complete else f"\n  next: {status.next_command}")
    return text


def shard_text(row: StageRow) -> str:
    """Return `done` or `done of expected`; nothing for stages that were not started or do not count in shards."""
    if not row.shards_done and row.state in (StageState.NOT_STARTED, StageState.COMPLETE, StageState.DRIFTED):
        return ""
    if row.shards_expected is None or row.shards_expected == row.shards_done:
        return f"{row.shards_done:,}"
    return f"{row.shards_done:,} of {row.shards_expected:,}"


def _spend_line(spend: Spend) -> str:
    note = " (as last reported; the journal may hold more)" if spend.source == "progress log" else ""
    return (
        f"spent {usd(spend.spent_usd)} of {usd(spend.budget_usd)} budget, {held_text(spend)}, "
        f"planned {usd(spend.planned_expected_usd)} (at worst {usd(spend.planned_worst_usd)}){note}"
    )


def held_text(spend: Spend) -> str:
    """Return what is in doubt, and the most that the bill can be because of it."""
    held_usd = dollars(spend.held_usd)
    text = f"held {usd(held_usd)}"
    if not held_usd:
        return text
    text += f" (the bill is at most {usd((dollars(spend.spent_usd) or 0) + held_usd)}"
    return f"{text}; 'eagle3 generate' compares it with the account)" if spend.source == "manifest" else f"{text})"


def render_summary(summary: Mapping[str, Any]) -> RenderableType:
    """Return the summary as something that rich can print."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, text in summary_lines(summary).items():
        table.add_row(name, Text(text))
    done = "complete" if summary.get("complete") else "not complete"
    return Group(Text(f"{summary.get('run')}: {done}", style="bold"), table)


def summary_lines(summary: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the summary as short lines by heading, in reading order; unknown figures show as `-`."""
    planned = as_mapping(summary.get("planned_usd"))
    providers = as_mapping(summary.get("providers"))
    exactness = as_mapping(summary.get("exactness"))
    corpus = as_mapping(summary.get("corpus"))
    paths = as_mapping(summary.get("paths"))
    positions = summary.get("acceptance_by_position")
    lines = {
        "samples": f"{_count(summary.get('samples'))} answered, {_count(summary.get('failed'))} failed, "
        f"{_count(summary.get('dropped_prompts'))} prompts dropped",
        "tokens": f"{_count(summary.get('tokens'))} ({_count(summary.get('prompt_tokens'))} prompt, "
        f"{_count(summary.get('completion_tokens'))} completion)",
        "exactness": ", ".join(f"{grade} {_count(count)}" for grade, count in exactness.items() if count) or "-",
        "audit": f"{summary.get('audit_verdict') or '-'} (kept {_count(at(summary, 'audit', 'kept'))}, "
        f"dropped {_count(at(summary, 'audit', 'dropped'))})",
        "dollars": f"spent {usd(summary.get('spent_usd'))}, planned {usd(planned.get('expected'))} "
        f"(at worst {usd(planned.get('worst'))}), budget {usd(summary.get('budget_usd'))}"
        + (f", held {usd(held)} for lost requests" if (held := dollars(summary.get("held_usd"))) else ""),
        "providers": ", ".join(
            f"{name} {share:.0%}" for name, entry in providers.items() if (share := number(at(entry, "sample_share")))
        )
        or "-",
        "corpus": f"{_count(at(corpus, 'train', 'samples'))} train, {_count(at(corpus, 'validation', 'samples'))} "
        f"validation, digest {str(summary.get('corpus_digest') or '-')[:12]}",
        "training loss": _figure(summary.get("training_loss")),
        "acceptance": f"{_figure(summary.get('acceptance_length_trained'))} trained, "
        f"{_figure(summary.get('acceptance_length_untrained'))} untrained (tokens per round)",
    }
    if isinstance(positions, list):
        rates: list[object] = list(positions)  # pyright: ignore[reportUnknownArgumentType] - JSON
        lines["by position"] = ", ".join(_figure(rate) for rate in rates)
    lines["files"] = ", ".join(
        str(path) for key, path in paths.items() if key in ("summary", "report", "draft", "export")
    )
    return lines


def _count(value: object) -> str:
    found = integer(value)
    return "-" if found is None else f"{found:,}"


def _figure(value: object) -> str:
    found = number(value)
    return "-" if found is None else f"{found:.3f}"


def usd(value: object) -> str:
    """Return dollars for people: cents for large amounts, up to six decimals for small ones, `-` for unknown ones."""
    amount = dollars(value)
    if amount is None:
        return "-"
    whole, _, decimals = f"{amount:,.6f}".partition(".")
    return f"${amount:,.2f}" if amount >= 10 else f"${whole}.{decimals.rstrip('0'):0<2}"
