"""Resting providers that fail in a row. Pure; the clock is an argument."""

from collections.abc import Sequence
from dataclasses import dataclass

FAILURES_IN_A_ROW = 5
"""Fewer are noise at thousands of requests."""
FIRST_REST_S = 60.0
LONGEST_REST_S = 1800.0


@dataclass(slots=True)
class _Health:
    failures: int = 0
    rests: int = 0
    until_s: float = 0.0


class Cooldown:
    """Knows which providers to leave out of new requests.

    A rest doubles each time. After it one failure is enough for the next, so that a provider that is still broken costs
    one request; a success forgets everything. The last provider is never left out.
    """

    def __init__(self) -> None:
        """Start with everybody healthy."""
        self._health: dict[str, _Health] = {}

    def succeeded(self, provider: str) -> None:
        """Note a good answer."""
        self._health.pop(provider, None)

    def failed(self, provider: str, now_s: float) -> None:
        """Note a fault or a worthless answer."""
        health = self._health.setdefault(provider, _Health())
        if now_s < health.until_s:
            return  # a request from before the rest
        health.failures += 1
        if health.failures >= FAILURES_IN_A_ROW or health.rests:
            health.until_s = now_s + min(FIRST_REST_S * 2**health.rests, LONGEST_REST_S)
            health.rests += 1
            health.failures = 0

    def resting(self, providers: Sequence[str], now_s: float) -> list[str]:
        """Return which of `providers` to leave out now; never all of them."""
        tired = [name for name in providers if name in self._health and now_s < self._health[name].until_s]
        if len(tired) < len(set(providers)):
            return sorted(set(tired))
        best = min(tired, key=lambda name: self._health[name].until_s)
        return sorted(set(tired) - {best})
