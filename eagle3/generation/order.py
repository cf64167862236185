"""Which sample is asked next: all datasets share the slots, and those with long answers run ahead. Pure.

A run lasts as long as its last answer, so at the end the slots should hold short answers. Each dataset's samples have
ranks from 0 to 1; equal ranks keep the datasets level. Where the lengths of a dataset's answers are known, its ranks
are scaled down by the share of the remaining time that its slowest answer may take, so that the last answers of all
datasets arrive together. With a tail so heavy that one answer may take all of that time, only the dataset with the
longest answers is asked, then the next: nothing that knows datasets and not single answers ends sooner.

Source: tests/bench/bench_schedule.py.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from eagle3.generation.history import Tally

if TYPE_CHECKING:
    from eagle3.generation.requests import Work

MIN_KNOWN_ANSWERS = 20
"""Fewer answers say little about lengths."""
TAIL_ROOM = 2.0
"""How much slower than the slowest answer so far one to come may be: the longest of the rest is still ahead."""
PICKS_PER_LOOK = 64
"""How often the paces are computed anew."""


def pace_of(slowest_s: float, remaining_s: float) -> float:
    """Return the factor for the ranks of a dataset whose answers take up to `slowest_s`, from 0 (now) to 1."""
    return max(0.0, 1.0 - slowest_s / remaining_s) if remaining_s > 0 else 0.0


class WaitingWork:
    """Samples that wait to be asked."""

    def __init__(self, tallies: Mapping[str, Tally], num_slots: Callable[[], float]) -> None:
        """Start empty.

        Args:
            tallies: By dataset; what is known about its answers, updated by others.
            num_slots: How many requests may be under way now.
        """
        self._tallies = tallies
        self._num_slots = num_slots
        self._heaps: dict[str, list[tuple[float, int, Work]]] = {}
        self._sequence = itertools.count()
        self._paces: dict[str, tuple[float, float]] = {}
        """By dataset: the factor for its ranks, and the mean seconds of its answers, which decide between equals."""
        self._num_picks = 0

    def __bool__(self) -> bool:
        return any(self._heaps.values())

    def push(self, work: "Work") -> None:
        """Let a sample wait; among equal ranks the first to come goes first."""
        heap = self._heaps.setdefault(work.plan.dataset, [])
        heapq.heappush(heap, (work.rank, next(self._sequence), work))

    def pop(self) -> "Work":
        """Return the sample to be asked now.

        Raises:
            ValueError: Nobody waits.
        """
        if self._num_picks % PICKS_PER_LOOK == 0:
            self._look()
        self._num_picks += 1
        waiting = [name for name, heap in self._heaps.items() if heap]
        return heapq.heappop(self._heaps[min(waiting, key=self._turn)])[2]

    def _turn(self, name: str) -> tuple[float, float]:
        pace, mean_s = self._paces.get(name, (1.0, 0.0))
        return self._heaps[name][0][0] * pace, -mean_s

    def _look(self) -> None:
        known = {
            name: tally
            for name, heap in self._heaps.items()
            if heap and (tally := self._tallies.get(name)) is not None and tally.timed >= MIN_KNOWN_ANSWERS
        }
        if len(known) < sum(bool(heap) for heap in self._heaps.values()):
            self._paces = {}  # the remaining time is unknown while a dataset's lengths are
            return
        means_s = {name: tally.waited_s / tally.timed for name, tally in known.items()}
        remaining_s = sum(len(self._heaps[name]) * mean_s for name, mean_s in means_s.items())
        remaining_s /= max(1.0, self._num_slots())
        self._paces = {
            name: (pace_of(TAIL_ROOM * tally.slowest_s, remaining_s), means_s[name]) for name, tally in known.items()
        }
