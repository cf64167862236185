"""In which batches the rows are computed, and how the batches are divided among machines. Pure.

Rounding depends on the shape of a batch. Which rows share a batch therefore follows from the corpus alone: not from
what an interrupted run left, and not from how many machines work. A batch is the smallest piece of work; one of which
a single row is missing is computed whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.hidden_states.backend import plan_batches

Batch = tuple[int, ...]
"""Rows that one forward pass computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPlan:
    """All rows, each in one batch."""

    probes: tuple[Batch, ...]
    """Rows the gates look at, computed before anything else."""
    batches: tuple[Batch, ...]
    """All other rows, longest first."""

    def group(self, number: int, count: int) -> tuple[Batch, ...]:
        """Return what group `number` of `count` commits; group 0 has the probes as well.

        Every `count`-th batch, so that all groups have about as many tokens.
        """
        own = self.batches[number::count]
        return (*self.probes, *own) if number == 0 else own


def plan_work(lengths: Sequence[int], batch_tokens: int, gate_samples: int) -> WorkPlan:
    """Cut the rows into batches.

    Args:
        lengths: Tokens of each row.
        batch_tokens: Most tokens of one batch, padding included.
        gate_samples: Rows the gates look at.
    """
    probes = gate_rows(len(lengths), gate_samples)
    others = sorted(set(range(len(lengths))) - set(probes))
    return WorkPlan(probes=_batches(probes, lengths, batch_tokens), batches=_batches(others, lengths, batch_tokens))


def gate_rows(num_rows: int, num_samples: int) -> list[int]:
    """Return the rows the gates look at: evenly spread, ascending, distinct."""
    wanted = min(num_rows, num_samples)
    return [index * num_rows // wanted for index in range(wanted)]


def _batches(rows: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> tuple[Batch, ...]:
    planned = plan_batches([lengths[row] for row in rows], batch_tokens)
    return tuple(tuple(rows[index] for index in batch) for batch in planned)
