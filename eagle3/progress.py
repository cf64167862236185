"""How long work tells others where it stands. Stages report; terminals, dashboards and files listen."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """One moment of one stage."""

    stage: str
    """Stage name, for example `generation`."""
    label: str = ""
    """Dataset, split or phase within the stage; empty when there is only one."""
    done: float
    """Units finished so far; failures count as finished."""
    total: float
    """Units in all; 0 when unknown."""
    unit: str = "samples"
    values: Mapping[str, float | int | str] = field(default_factory=dict[str, "float | int | str"])
    """Further figures: `spent_usd`, `in_flight`, `loss`, ..."""
    providers: Mapping[str, Mapping[str, float | int | str]] = field(
        default_factory=dict[str, "Mapping[str, float | int | str]"]
    )
    """While answers are bought: `answers` and `spent_usd` by provider."""


Progress: TypeAlias = Callable[[ProgressEvent], None]


def no_progress(event: ProgressEvent) -> None:
    """Listen to nothing."""
