"""One check and its outcome, and what collects them while they are made."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum

from eagle3.errors import Eagle3Error
from eagle3.records import JsonObject


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

    def to_json(self) -> JsonObject:
        """Return the check for programs."""
        return asdict(self)


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
