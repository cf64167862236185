"""Who may send now: requests queue for the limiter, first come, first served."""

import asyncio
import time
from collections import deque

from eagle3.generation.limiter import ProbeLimiter


class Slots:
    """Hands the limiter's tickets to waiting requests."""

    def __init__(self, limiter: ProbeLimiter) -> None:
        """Start with nobody waiting."""
        self.limiter = limiter
        self._waiting: deque[asyncio.Future[int | None]] = deque()
        self._is_closed = False

    async def acquire(self) -> int | None:
        """Return a ticket, or None when sending has stopped."""
        if self._is_closed:
            return None
        if not self._waiting:
            ticket = self.limiter.try_start(time.monotonic())
            if ticket is not None:
                return ticket
        waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        return await waiter

    def pump(self) -> None:
        """Let waiting requests go as far as the limit allows now."""
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
                continue
            ticket = self.limiter.try_start(time.monotonic())
            if ticket is None:
                return
            self._waiting.popleft().set_result(ticket)

    def close(self) -> None:
        """Send everybody away."""
        self._is_closed = True
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
