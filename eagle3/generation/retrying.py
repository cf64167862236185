"""How long a failed request waits before it is asked again."""

import asyncio
import contextlib
import random

from eagle3.generation.pacing import RetryBudget
from eagle3.providers.classify import Outcome

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
LONGEST_RETRY_AFTER_S = 120.0
OVER_RETRY_BUDGET_S = 120.0
"""Longest wait before a retry beyond the run's share of retries."""


def backoff_s(retries: RetryBudget, num_attempts: int, outcome: Outcome) -> float:
    """Return the seconds to wait, with jitter; counts a retry.

    Args:
        retries: Of the run.
        num_attempts: Of the sample so far.
        outcome: How the last one ended.
    """
    wait_s = random.uniform(0.0, min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**num_attempts))  # noqa: S311 - jitter
    if not retries.take():
        wait_s = random.uniform(0.5, 1.0) * OVER_RETRY_BUDGET_S  # noqa: S311 - jitter
    if outcome.retry_after_s is not None:
        wait_s = max(wait_s, min(outcome.retry_after_s, LONGEST_RETRY_AFTER_S))
    return wait_s


async def rest(retry_after_s: float | None, stop: asyncio.Event) -> None:
    """Wait as the provider asked, and a little more so that not all come back at once; `stop` ends it."""
    if not retry_after_s or stop.is_set():
        return
    wait_s = min(retry_after_s, LONGEST_RETRY_AFTER_S) * random.uniform(1.0, 1.25)  # noqa: S311 - jitter
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await stop.wait()
