"""How much an endpoint takes at a given moment: requests in flight, and requests per second. Pure; time is an argument.

Durations of the scenario count from the first chat request and are scaled by its `time_scale`, as all others are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from eagle3.simulator.scenario import Provider


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_s: float


class Capacities:
    """Admits requests to endpoints."""

    def __init__(self, time_scale: float, in_flight: Mapping[str, int]) -> None:
        """Watch `in_flight`, requests by endpoint tag, which others keep."""
        self._time_scale = time_scale
        self._in_flight = in_flight
        self._first_s: float | None = None
        self._buckets: dict[str, _Bucket] = {}

    def admits(self, provider: Provider, now_s: float) -> bool:
        """Return whether the endpoint takes one more request now; if so, it counts for its rate."""
        if self._first_s is None:
            self._first_s = now_s
        capacity = provider.capacity_at(self._scenario_s(now_s))
        if capacity is not None and self._in_flight.get(provider.tag, 0) >= capacity:
            return False
        return self._takes_token(provider, now_s)

    def _scenario_s(self, now_s: float) -> float:
        """Seconds of the scenario since the first request; with a scale of zero everything has happened already."""
        assert self._first_s is not None
        return (now_s - self._first_s) / self._time_scale if self._time_scale > 0 else float("inf")

    def _takes_token(self, provider: Provider, now_s: float) -> bool:
        rate = provider.rate
        if rate is None or self._time_scale <= 0:
            return True
        at_s = self._scenario_s(now_s)
        bucket = self._buckets.setdefault(provider.tag, _Bucket(float(rate.burst), at_s))
        bucket.tokens = min(float(rate.burst), bucket.tokens + (at_s - bucket.filled_s) * rate.per_s)
        bucket.filled_s = at_s
        if bucket.tokens < 1.0:
            return False
        bucket.tokens -= 1.0
        return True
