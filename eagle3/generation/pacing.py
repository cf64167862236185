"""What holds requests back beside money and slots: the run's share of retries, and token budgets. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from eagle3.generation.history import History

if TYPE_CHECKING:
    from eagle3.generation.requests import Work

RETRY_SHARE = 0.1
"""Of all requests. A service that fails more often gets no better from being asked again at once, and each failure may
be billed."""
FREE_RETRIES = 100
"""Retries that a run may make before the share counts; small runs are all chance."""
GUESSED_SHARE = 0.5
"""Expected length of an answer as a share of `max_tokens`, while no answers are known."""
RELEASED_AT_ONCE = 2
"""Parked samples that are looked at again for each request that ended: more than one, so that slots fill again."""


class RetryBudget:
    """One budget of retries for the whole run, whichever samples they are for."""

    def __init__(self) -> None:
        """Start with nothing sent."""
        self.num_requests = 0
        self.num_retries = 0
        self.num_slowed = 0
        """Retries that had to wait longer because the budget was used up."""

    def sent(self) -> None:
        """Count a request that came to an end other than a refusal by rate limit."""
        self.num_requests += 1

    def take(self) -> bool:
        """Count a retry; False when it is beyond the budget and must be slow."""
        self.num_retries += 1
        if self.num_retries <= FREE_RETRIES + RETRY_SHARE * self.num_requests:
            return True
        self.num_slowed += 1
        return False


class Admission(StrEnum):
    """What a token budget says about one more request."""

    GO = "go"
    WAIT = "wait"
    """Requests under way may use the rest up; look again when one ends."""
    OVER = "over"
    """The dataset has its tokens."""


class TokenBudget:
    """Ends the buying for datasets that hold as many completion tokens as the recipe wants, imported ones counted.

    Requests under way count with the mean length of the dataset's answers, so the budget is passed by about the length
    of a few answers, not by that of all slots.
    """

    def __init__(self, caps: Mapping[str, int], history: History) -> None:
        """Watch the datasets that have a cap; others are always admitted."""
        self._caps = caps
        self._history = history
        self._active: dict[str, int] = {}
        self._parked: dict[str, list[Work]] = {}

    def admission(self, work: "Work") -> Admission:
        """Say whether the sample may be asked for now. One that was asked before is: its answer may be paid for."""
        dataset = work.plan.dataset
        cap = self._caps.get(dataset)
        if cap is None or work.history.attempts:
            return Admission.GO
        tally = self._history.tally(dataset)
        if tally.completion_tokens >= cap:
            return Admission.OVER
        active = self._active.get(dataset, 0)
        mean = tally.completion_tokens / tally.samples if tally.samples else 0.0
        expected = mean or work.plan.sampling.max_tokens * GUESSED_SHARE
        is_open = not active or tally.completion_tokens + active * expected < cap
        return Admission.GO if is_open else Admission.WAIT

    def begun(self, dataset: str) -> None:
        """Note a request under way."""
        self._active[dataset] = self._active.get(dataset, 0) + 1

    def ended(self, dataset: str) -> "list[Work]":
        """Note the end of one; return parked samples to look at again."""
        self._active[dataset] -= 1
        parked = self._parked.get(dataset, [])
        return [parked.pop() for _ in range(min(RELEASED_AT_ONCE, len(parked)))]

    def park(self, work: "Work") -> None:
        """Keep a sample until a request of its dataset ends."""
        self._parked.setdefault(work.plan.dataset, []).append(work)

    def give_up(self, dataset: str) -> "list[Work]":
        """Return the parked samples of a dataset that has its tokens; they are not asked for."""
        return self._parked.pop(dataset, [])
