"""Requests whose reply we never saw: asked again only when the first one has certainly ended.

A response cache knows finished answers. While a request runs at the provider, the same bytes sent again are a second
request and a second bill. So a lost request waits here, while others take its slot, until one of these is known:

- its generation is listed in the provider's books: it has ended, what it cost is charged, and the cache has the answer;
- the account explained the money: nothing is under way any more;
- the deadline has passed that any request of its length has, counted from when it was sent.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from eagle3.generation.doubts import Doubts
from eagle3.generation.ledger import Ledger, RequestKey
from eagle3.generation.requests import Work

LOOK_S = 1.0
LOOK_SHARE = 0.25
"""A generation is looked up again after so much of its age: often while it is young, rarely when it is old."""


@dataclass(slots=True, eq=False)
class _Lost:
    work: Work
    key: RequestKey
    generation_id: str | None
    sent_s: float
    """All times are of the monotonic clock."""
    ends_s: float
    rests_until_s: float
    """Not asked again before, whatever is known."""
    look_s: float = 0.0


class LostRequests:
    """Keeps lost requests until they may be asked again. Lives on the engine's loop."""

    def __init__(self, doubts: Doubts, ledger: Ledger, again: Callable[[Work, float], None]) -> None:
        """Start with none.

        Args:
            doubts: Looks generations up.
            ledger: Knows whose money is still in doubt.
            again: Queues a sample again after so many seconds.
        """
        self._doubts = doubts
        self._ledger = ledger
        self._again = again
        self._lost: set[_Lost] = set()

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._lost)

    def follow(
        self, work: Work, key: RequestKey, generation_id: str | None, *, age_s: float, runs_s: float, rest_s: float
    ) -> None:
        """Ask the sample again when the request has ended.

        Args:
            work: The sample.
            key: The request.
            generation_id: From its headers; None when none arrived.
            age_s: Seconds since it was sent.
            runs_s: Most seconds that it can run.
            rest_s: Least seconds until the sample is asked again.
        """
        now_s = time.monotonic()
        lost = _Lost(work, key, generation_id, now_s - age_s, now_s - age_s + runs_s, now_s + rest_s)
        self._lost.add(lost)
        self._end_if_known(lost, now_s)

    async def look_forever(self) -> None:
        """Look lost requests up, and let those go that have ended."""
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            for lost in list(self._lost):
                self._end_if_known(lost, now_s)
            due = [lost for lost in self._lost if lost.generation_id is not None and lost.look_s <= now_s]
            await asyncio.gather(*map(self._look, due))

    async def _look(self, lost: _Lost) -> None:
        assert lost.generation_id is not None
        is_listed = await self._doubts.look_up(lost.work.plan.dataset, lost.key, lost.generation_id)
        now_s = time.monotonic()
        if is_listed:
            self._end(lost, now_s)
        else:
            lost.look_s = now_s + LOOK_SHARE * (now_s - lost.sent_s)

    def _end_if_known(self, lost: _Lost, now_s: float) -> None:
        if lost.ends_s <= now_s or not self._ledger.is_held(lost.key):
            self._end(lost, now_s)

    def _end(self, lost: _Lost, now_s: float) -> None:
        self._lost.discard(lost)
        self._again(lost.work, max(0.0, lost.rests_until_s - now_s))
