"""A report of many checks: for people a table, for programs JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from eagle3.errors import PreflightError
from eagle3.records import JsonObject
from eagle3.tokens.checklist import Check, Outcome

MAX_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport:
    """Everything that was looked at before a run."""

    checks: Sequence[Check]

    @property
    def failed(self) -> Sequence[Check]:
        """The checks that forbid a start."""
        return [check for check in self.checks if check.outcome is Outcome.FAILED]

    def to_json(self) -> JsonObject:
        """Return the report for programs."""
        counts = {outcome.value: sum(check.outcome is outcome for check in self.checks) for outcome in Outcome}
        return {"passed": not self.failed, "counts": counts, "checks": [check.to_json() for check in self.checks]}

    def raise_if_failed(self) -> None:
        """Forbid the start.

        Raises:
            PreflightError: A check failed; the message names each with what to do.
        """
        failed = self.failed
        if not failed:
            return
        lines = [f"{check.id} {check.name}: {check.found} {check.advice}".rstrip() for check in failed]
        more = f"\n  … and {len(lines) - MAX_SHOWN} more" if len(lines) > MAX_SHOWN else ""
        raise PreflightError(
            f"{len(failed)} of {len(self.checks)} checks before the run failed; nothing was spent:\n  "
            + "\n  ".join(lines[:MAX_SHOWN])
            + f"{more}\n'eagle3 preflight RECIPE' shows all of them."
        )


_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.WARNING: "yellow",
    Outcome.SKIPPED: "dim",
}


def render_checks(checks: Sequence[Check]) -> Table:
    """Return checks as a table for people."""
    table = Table(box=None, pad_edge=False)
    for head in ("check", "what", "outcome", "found"):
        table.add_column(head, overflow="fold")
    for check in checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n{check.advice}", style="italic")
        table.add_row(check.id, check.name, Text(check.outcome.value, style=_STYLES[check.outcome]), found)
    return table
