"""One check and its outcome, and a report of many: for people a table, for programs JSON."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.table import Table
from rich.text import Text

from eagle3.errors import Eagle3Error, PreflightError
from eagle3.records import JsonObject

MAX_SHOWN = 5


class Outcome(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    """The run must not start."""
    WARNING = "warning"
    """Worth a look; the run may start."""
    SKIPPED = "skipped"
    """It does not apply here, or what it needs is not there; the detail says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    id: str
    """`P3` and its like; several checks may share one."""
    name: str
    outcome: Outcome
    found: str
    """What was found, and for a failure what was expected."""
    advice: str = ""
    """What to do; empty unless it failed or warns."""


class _FailedError(Exception):
    """A check does not hold."""


class Recorder:
    """Collects checks; a block that raises one of our errors becomes a failed check."""

    def __init__(self) -> None:
        """Start empty."""
        self.checks: list[Check] = []

    @contextmanager
    def check(
        self, check_id: str, name: str, advice: str, *, is_binding: bool = True
    ) -> Generator[Callable[[str], None]]:
        """Run one check: the block gets a function that notes what was found, and fails by raising.

        Args:
            check_id: Its id.
            name: What is looked at.
            advice: What to do when it fails.
            is_binding: False makes a failure a warning.
        """
        notes: list[str] = []
        try:
            yield notes.append
        except (_FailedError, Eagle3Error) as exc:
            self._add(check_id, name, Outcome.FAILED if is_binding else Outcome.WARNING, str(exc), advice)
        else:
            self._add(check_id, name, Outcome.PASSED, "; ".join(notes), "")

    def warn(self, check_id: str, name: str, found: str, advice: str) -> None:
        """Note something worth a look."""
        self._add(check_id, name, Outcome.WARNING, found, advice)

    def skip(self, check_id: str, name: str, reason: str) -> None:
        """Note a check that was not made."""
        self._add(check_id, name, Outcome.SKIPPED, reason, "")

    def _add(self, check_id: str, name: str, outcome: Outcome, found: str, advice: str) -> None:
        self.checks.append(Check(id=check_id, name=name, outcome=outcome, found=found, advice=advice))


def require(condition: object, problem: str) -> None:
    """Fail the check under way with `problem` unless the condition holds."""
    if not condition:
        raise _FailedError(problem)


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
        return {"passed": not self.failed, "counts": counts, "checks": [asdict(check) for check in self.checks]}

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


def render_checks(report: PreflightReport) -> Table:
    """Return the report as a table for people."""
    table = Table(box=None, pad_edge=False)
    for head in ("check", "what", "outcome", "found"):
        table.add_column(head, overflow="fold")
    for check in report.checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n{check.advice}", style="italic")
        table.add_row(check.id, check.name, Text(check.outcome.value, style=_STYLES[check.outcome]), found)
    return table
