"""The HTML report of a run: one self-contained file, useful from the first minute of a run to its end.

Everything that comes from data is escaped by `markup` and `svg`. Sections whose stage has not run say so.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

from eagle3.artifacts import RunDirectory, commit_bytes
from eagle3.report.answer_sections import (
    exactness_section,
    left_out_section,
    lengths_section,
    providers_section,
    read_token_lengths,
    spend_section,
)
from eagle3.report.draft_sections import acceptance_section, gates_section, training_section
from eagle3.report.markup import card, flat, page, section, table, without_secrets
from eagle3.report.reading import RunView, as_mapping, at, integer, number, read_run
from eagle3.report.rendering import shard_text, usd
from eagle3.report.status import RunStatus, status_of
from eagle3.report.summary import stage_seconds, summary_of


def write_report(run: RunDirectory) -> None:
    """Write `report.html` into the run directory.

    Raises:
        InputError: There is no such directory.
    """
    commit_bytes(run.report_path, build_report(run).encode())


def build_report(run: RunDirectory) -> str:
    """Return the report of a run as one HTML document.

    Raises:
        InputError: There is no such directory.
    """
    view = read_run(run)
    status = status_of(view)
    summary = summary_of(view)
    parts = [
        _headline(summary),
        _road(view, status),
        spend_section(view, status),
        lengths_section(read_token_lengths(run, view)),
        providers_section(view),
        exactness_section(view),
        left_out_section(view),
        gates_section(view),
        training_section(view),
        acceptance_section(view),
        _provenance(view),
    ]
    lead = f"{summary['target'] or 'target unknown'} · {'complete' if status.is_complete else 'not complete yet'}"
    return page(f"{view.name}", lead, "".join(parts))


def _headline(summary: Mapping[str, Any]) -> str:
    def count(key: str) -> str:
        found = integer(summary[key])
        return "-" if found is None else f"{found:,}"

    def figure(key: str, digits: int) -> str:
        found = number(summary[key])
        return "-" if found is None else f"{found:.{digits}f}"

    planned = as_mapping(summary["planned_usd"])
    cards = [
        card("samples", count("samples"), f"{count('failed')} failed, {count('dropped_prompts')} prompts dropped"),
        card("tokens", count("tokens"), f"{count('completion_tokens')} of them completion"),
        card(
            "spent",
            usd(summary["spent_usd"]),
            f"planned {usd(planned.get('expected'))}, budget {usd(summary['budget_usd'])}",
        ),
        card("audit", str(summary["audit_verdict"] or "-"), f"{at(summary, 'audit', 'dropped') or 0} samples dropped"),
        card("training loss", figure("training_loss", 3)),
        card(
            "acceptance length",
            figure("acceptance_length_trained", 2),
            f"untrained {figure('acceptance_length_untrained', 2)}, tokens per round",
        ),
    ]
    return f'<section id="headline"><div class="cards">{"".join(cards)}</div></section>'


def _road(view: RunView, status: RunStatus) -> str:
    seconds = stage_seconds(view)
    rows = [
        [
            row.stage.value,
            row.state.value,
            shard_text(row),
            row.samples or None,
            row.tokens or None,
            seconds.get(row.stage),
            without_secrets(row.reason),
        ]
        for row in status.stages
    ]
    heads = ["stage", "state", "files", "samples", "tokens", "seconds", "why it is not complete"]
    datasets = [
        [
            entry.dataset,
            entry.prompts,
            entry.answered,
            entry.failed,
            entry.dropped,
            entry.completion_tokens,
            usd(entry.cost_usd),
        ]
        for entry in status.datasets
    ]
    dataset_heads = ["dataset", "wanted", "answered", "failed", "dropped", "completion tokens", "cost"]
    return section("road", "The road", table(heads, rows, (2, 3, 4, 5)), table(dataset_heads, datasets, range(1, 7)))


_PROVENANCE_KEYS = ("started_at", "overrides", "python", "platform", "packages", "run_fingerprint")
"""What may be told about how a run was started; the rest (folders, host, user) stays on the machine."""


def _provenance(view: RunView) -> str:
    told = [[key, flat(view.provenance[key])] for key in _PROVENANCE_KEYS if key in view.provenance]
    sealed = [
        [stage.value, found.manifest.fingerprint[:16], found.manifest.digest[:16], found.manifest.created_at]
        for stage, found in view.stages.items()
        if found.manifest is not None
    ]
    recipe = ""
    if view.recipe_text:
        text = escape(without_secrets(view.recipe_text))
        recipe = f"<details open><summary>recipe.yaml</summary><pre>{text}</pre></details>"
    return section(
        "provenance",
        "Provenance",
        table(["stage", "fingerprint", "digest", "sealed at (UTC)"], sealed),
        table(["attempt", "value"], told),
        recipe,
    )
