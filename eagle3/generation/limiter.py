"""How many requests may be under way: probing the provider's hidden capacity. Pure; the clock is an argument.

After a refusal the limit becomes what the provider evidently carries. What is carried shows a moment later, since
providers refuse sooner than that: it is the requests of that moment which were not refused too. Then the limit stands
still until enough answers came in to pay for the next refusals, and grows again: slowly at first, where the capacity
was found, then faster and faster, because a capacity that is not met there has risen. Additive growth per
answer is far too slow for answers of 20 seconds, and growth at a constant rate is either slow to follow or costly to
stay. Stray refusals among many acceptances are noise and change nothing. A refused request is not an attempt: with
capped retries at a fixed concurrency most samples get lost.

Source: tests/unit/generation/test_limiter.py simulates hidden capacities, steps, rate caps and stray refusals;
tests/bench/bench_limits.py measures the same live.
"""

import math
from dataclasses import dataclass

START_LIMIT = 64.0
"""A burst that most providers carry; the ramp makes 2000 of it in five seconds."""
RAMP_PER_S = math.log(2.0)
"""Growth before the first cut, and the most after one, as an exponent per second: twice as many every second."""
GROWTH_PER_S = 0.03
"""Growth right after cuts that confirmed the capacity."""
DOUBLING_S = 1.5
"""The growth itself doubles in this time without a refusal."""
SLOWING = 8.0
"""A cut divides the growth by this."""
ANSWERS_PER_REFUSAL = 10.0
"""Requests that end before a cut limit grows again, for each refusal that led to the cut."""
MAX_REST_S = 8.0
"""Longest time that a cut limit stands still."""
USED_SHARE = 0.5
"""The limit grows only while at least this share of it is under way: unused room proves nothing."""
MAX_STEP_S = 0.2
"""Time that counts for one step of growth: while our own loop stands still, refusals are not heard either."""
SETTLED_S = 0.75
"""A request this old was accepted: providers refuse sooner."""
NOISE_SHARE = 0.08
"""Fewer refusals than this among the requests of their moment are stray ones."""
OVERLOAD_WEIGHT = 0.5
"""An overload error hints at the capacity more weakly than a refusal."""
MIN_PAUSE_S = 5.0
"""A shorter Retry-After concerns one request; this and longer ones pause everything, unless it is noise."""
MAX_PAUSE_S = 30.0


@dataclass(slots=True)
class _Doubt:
    """The moment after a refusal, `SETTLED_S` long."""

    since_s: float
    carried: int
    """Requests under way that were not refused, of those at the refusal and of those that took their places."""
    young: int
    """Requests too new at the refusal to be known as accepted, or sent since, that were not refused."""
    refused: float
    pause_s: float


class ProbeLimiter:
    """Admits requests; all times are seconds of one monotonic clock."""

    def __init__(self, ceiling: int, start: float = START_LIMIT) -> None:
        """Admit `start` requests at first, and never more than `ceiling`."""
        self._ceiling = float(ceiling)
        self._limit = max(1.0, min(float(start), self._ceiling))
        self._growth = RAMP_PER_S
        self._grown_at_s: float | None = None
        self._rest_until_s = -math.inf
        self._rest_answers = 0.0
        self._doubt: _Doubt | None = None
        self._judged_ticket = 0
        self._paused_until_s = -math.inf
        self._started: dict[int, float] = {}
        self._next_ticket = 0
        self.num_refused = 0
        self.peak = 0

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return len(self._started)

    def limit(self, now_s: float) -> float:
        """Return how many requests may be under way now."""
        doubt = self._doubt
        if doubt is not None and now_s - doubt.since_s >= SETTLED_S:
            self._judge(doubt, now_s)
            doubt = None
        self._grow(now_s)
        return self._limit if doubt is None else min(self._limit, max(1.0, float(doubt.carried)))

    def try_start(self, now_s: float) -> int | None:
        """Return a ticket for one more request, or None when it has to wait."""
        if self.in_flight >= math.floor(self.limit(now_s)) or now_s < self._paused_until_s:
            return None
        self._next_ticket += 1
        self._started[self._next_ticket] = now_s
        if self._doubt is not None:
            self._doubt.young += 1
        self.peak = max(self.peak, self.in_flight)
        return self._next_ticket

    def finish(self, ticket: int) -> None:
        """End a request that says nothing about the capacity."""
        if self._started.pop(ticket, None) is not None:
            self._rest_answers -= 1

    def refuse(self, ticket: int, now_s: float, retry_after_s: float | None = None) -> None:
        """End a request that the provider refused for its rate."""
        self.num_refused += 1
        pause_s = retry_after_s if retry_after_s is not None and retry_after_s >= MIN_PAUSE_S else 0.0
        self._doubted(ticket, now_s, 1.0, min(pause_s, MAX_PAUSE_S))

    def overload(self, ticket: int, now_s: float) -> None:
        """End a request that failed because the provider is overloaded."""
        self._doubted(ticket, now_s, OVERLOAD_WEIGHT, 0.0)

    def _grow(self, now_s: float) -> None:
        quiet_s = 0.0 if self._grown_at_s is None else min(MAX_STEP_S, now_s - self._grown_at_s)
        self._grown_at_s = now_s
        is_resting = self._rest_answers > 0 and now_s < self._rest_until_s
        if is_resting or self.in_flight < USED_SHARE * self._limit:
            return
        self._limit = min(self._ceiling, self._limit * math.exp(self._growth * quiet_s))
        self._growth = min(RAMP_PER_S, self._growth * math.exp2(quiet_s / DOUBLING_S))

    def _doubted(self, ticket: int, now_s: float, weight: float, pause_s: float) -> None:
        self.limit(now_s)  # judges an older doubt first
        self._started.pop(ticket, None)
        if ticket <= self._judged_ticket:
            return  # sent before the last judgement, which knew its moment
        doubt = self._doubt
        if doubt is None:
            young = 0
            for start_s in reversed(self._started.values()):
                if now_s - start_s >= SETTLED_S:
                    break
                young += 1
            self._doubt = _Doubt(now_s, self.in_flight, young, weight, pause_s)
            return
        doubt.refused += weight
        doubt.pause_s = max(doubt.pause_s, pause_s)
        doubt.young = max(0, doubt.young - 1)
        doubt.carried = max(0, doubt.carried - 1)

    def _judge(self, doubt: _Doubt, now_s: float) -> None:
        self._doubt = None
        self._judged_ticket = self._next_ticket
        if doubt.refused <= NOISE_SHARE * (doubt.refused + doubt.young):
            return
        self._limit = max(1.0, min(float(doubt.carried), self._ceiling))
        self._growth = max(GROWTH_PER_S, self._growth / SLOWING)
        self._grown_at_s = now_s
        self._rest_answers = ANSWERS_PER_REFUSAL * doubt.refused
        self._rest_until_s = now_s + MAX_REST_S
        if doubt.pause_s:
            self._paused_until_s = max(self._paused_until_s, doubt.since_s + doubt.pause_s)
