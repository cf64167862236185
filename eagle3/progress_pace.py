"""How fast work goes and how long it still takes, judged from what was seen. Pure; the clock is an argument."""

from collections import deque

WINDOW_S = 60.0
"""The pace is that of the last minute: calm, and quick enough to show a change."""
MIN_SEEN_S = 3.0
"""A shorter look says nothing."""
UNCHANGED_S = 0.5
"""Moments closer together than this are kept as one."""


class Pace:
    """Watches one count that grows."""

    def __init__(self, now_s: float, done: float) -> None:
        """Begin to watch; what was done before says nothing about the pace."""
        self.started_s = now_s
        self.started_done = done
        self._moments: deque[tuple[float, float]] = deque([(now_s, done)])

    def note(self, now_s: float, done: float) -> None:
        """Take the count at a moment."""
        if len(self._moments) > 1 and now_s - self._moments[-2][0] < UNCHANGED_S:
            self._moments.pop()
        self._moments.append((now_s, done))
        while len(self._moments) > 2 and now_s - self._moments[1][0] >= WINDOW_S:
            self._moments.popleft()

    @property
    def gained(self) -> float:
        """Units done since watching began."""
        return self._moments[-1][1] - self.started_done

    def per_s(self) -> float:
        """Return units per second over the last minute, or over the later half of a shorter time; 0 when unknown.

        The later half, because work that has to warm up is slow at first.
        """
        now_s, done = self._moments[-1]
        if now_s - self.started_s < MIN_SEEN_S:
            return 0.0
        since_s = max(now_s - WINDOW_S, (self.started_s + now_s) / 2)
        earlier = [moment for moment in self._moments if moment[0] <= since_s]
        then_s, done_then = earlier[-1] if earlier else self._moments[0]
        return max(0.0, (done - done_then) / (now_s - then_s)) if now_s > then_s else 0.0

    def left_s(self, total: float, under_way: float = 0.0) -> float | None:
        """Return how long the rest takes at this pace; None while that cannot be said.

        Args:
            total: Units in all; 0 when unknown.
            under_way: Units begun and not done. Until as many are done as are under way, only those that happened to be
                quick are done, and their pace is not the work's.
        """
        per_s = self.per_s()
        if not total or per_s <= 0 or self.gained < max(1.0, under_way):
            return None
        return max(0.0, total - self._moments[-1][1]) / per_s


def duration(seconds: float) -> str:
    """Return a time for people: `51 s`, `12 min 5 s`, `3 h 20 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
