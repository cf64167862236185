"""The report of a reply file as a table for people."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from rich.console import Group
from rich.table import Table

from eagle3.records import JsonObject, Severity


def render_report(report: JsonObject) -> Group:
    """Return the report as tables: one row per provider and model, and the findings."""
    table = Table("provider, model, grammar", "lines", "habits", show_lines=True)
    for provider, entry in cast("Mapping[str, JsonObject]", report["providers"]).items():
        for model in cast("list[JsonObject]", entry["models"]):
            read_by = " ".join(part for part in (str(model["grammar"]), str(model["mode"])) if part)
            deltas = cast("Mapping[str, int]", model["delta"])
            counts = [
                f"{model['samples'] + model['bad_lines']} lines",
                *(f"{name}: {count}" for name, count in cast("Mapping[str, int]", model["exactness"]).items()),
                *(f"delta {delta}: {count}" for delta, count in deltas.items()),
            ]
            habits = _habits(cast("JsonObject", model["profile"] or {}))
            table.add_row(f"{provider}\n{model['model']}\n{read_by}", "\n".join(counts), habits)
    findings = Table("finding", "lines", title="findings")
    for rule, count in cast("Mapping[str, int]", report["findings"]).items():
        findings.add_row(rule, str(count))
    for provider, entry in cast("Mapping[str, JsonObject]", report["providers"]).items():
        for finding in cast("list[JsonObject]", entry["group_findings"]):
            if finding["severity"] in (Severity.ERROR, Severity.CRITICAL):
                findings.add_row(f"{finding['rule']}, all of {provider}", str(finding["detail"]))
    summary = f"{report['lines']} lines, {report['samples']} rebuilt, {report['bad_lines']} could not be read"
    return Group(table, *([findings] if findings.row_count else []), summary)


def _habits(profile: JsonObject) -> str:
    identified = cast("Mapping[str, bool]", profile.get("identified", {}))
    compared = set(cast("Sequence[str]", profile.get("compared", ())))
    lines: list[str] = []
    for axis, value in cast("Mapping[str, Any]", profile.get("habits", {})).items():
        known = "compared" if axis in compared else "identified" if identified[axis] else "open"
        lines.append(f"{axis} {_plain(value)} ({known})")
    return "\n".join(lines)


def _plain(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
