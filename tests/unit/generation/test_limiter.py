"""The limiter against simulated providers: hidden capacities, steps, rate caps and stray refusals."""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from eagle3.generation.limiter import MAX_PAUSE_S, SETTLED_S, ProbeLimiter

REJECT_S = 0.25
ANSWER_S = 20.0
SLOTS = 2000


@dataclass
class Result:
    done_s: float
    refused: int
    answers: int
    peak: int


def simulate(
    num_requests: int,
    accepts: Callable[[float, int, random.Random], bool],
    *,
    answer_s: float = ANSWER_S,
    slots: int = SLOTS,
    seed: int = 1,
) -> Result:
    """Run until 95 % of the requests are answered; refused ones queue again at the end."""
    rng = random.Random(seed)
    limiter = ProbeLimiter(slots)
    waiting = deque(range(num_requests))
    events: list[tuple[float, int, str, int, int]] = []
    order = itertools.count()
    accepted = refused = answers = 0
    now = 0.0
    heapq.heappush(events, (0.0, next(order), "tick", 0, 0))
    while answers < 0.95 * num_requests:
        now, _, kind, ticket, request = heapq.heappop(events)
        if kind == "tick":
            heapq.heappush(events, (now + 0.05, next(order), "tick", 0, 0))
        elif kind == "answer":
            accepted -= 1
            answers += 1
            limiter.finish(ticket)
        else:
            refused += 1
            limiter.refuse(ticket, now)
            waiting.append(request)
        while waiting:
            started = limiter.try_start(now)
            if started is None:
                break
            request = waiting.popleft()
            if accepts(now, accepted, rng):
                accepted += 1
                wait = answer_s * rng.lognormvariate(-0.5 * 0.6**2, 0.6)
                heapq.heappush(events, (now + wait, next(order), "answer", started, request))
            else:
                heapq.heappush(events, (now + REJECT_S, next(order), "refusal", started, request))
    return Result(now, refused, answers, limiter.peak)


def ideal_s(num_requests: int, capacity: float) -> float:
    return 0.95 * num_requests * ANSWER_S / capacity


def test_a_hidden_capacity_is_kept_full_with_few_refusals():
    result = simulate(12_000, lambda now, accepted, rng: accepted < 600)
    assert ideal_s(12_000, 600) / result.done_s >= 0.92
    assert result.refused / result.answers <= 0.2


def test_a_capacity_that_falls_and_rises_is_followed():
    def accepts(now: float, accepted: int, rng: random.Random) -> bool:
        return accepted < (600 if now < 300 else 250 if now < 700 else 1000)

    result = simulate(20_000, accepts)
    # Answers that the capacity allows per second, integrated until the observed end.
    allowed = (300 * 600 + 400 * 250 + (result.done_s - 700) * 1000) / ANSWER_S
    assert result.answers / allowed >= 0.90
    assert result.refused / result.answers <= 0.3


def test_a_pure_rate_cap_is_used_well():
    bucket = {"tokens": 60.0, "at": 0.0}

    def accepts(now: float, accepted: int, rng: random.Random) -> bool:
        bucket["tokens"] = min(60.0, bucket["tokens"] + (now - bucket["at"]) * 30)
        bucket["at"] = now
        if bucket["tokens"] >= 1:
            bucket["tokens"] -= 1
            return True
        return False

    result = simulate(9_000, accepts)
    assert (0.95 * 9_000 / 30) / result.done_s >= 0.8
    assert result.refused / result.answers <= 0.5


@pytest.mark.parametrize("answer_s", [20.0, 2.0, 0.3])
def test_stray_refusals_do_not_shrink_the_limit(answer_s: float):
    result = simulate(4_000, lambda now, accepted, rng: rng.random() > 0.04, answer_s=answer_s, slots=200)
    ideal = 0.95 * 4_000 * answer_s / 200
    assert ideal / result.done_s >= (0.8 if answer_s >= 2 else 0.5)


def test_without_refusals_the_limit_ramps_to_the_ceiling():
    limiter = ProbeLimiter(2000)
    assert limiter.try_start(0.0) is not None
    assert limiter.limit(0.0) == 256
    assert limiter.limit(10.0) == 2000


def test_a_refusal_leaves_what_was_carried():
    limiter = ProbeLimiter(100)
    tickets = [limiter.try_start(0.0) for _ in range(100)]
    assert limiter.try_start(0.0) is None
    for ticket in tickets[60:]:
        assert ticket is not None
        limiter.refuse(ticket, 0.2)
    assert limiter.limit(0.2) == 60
    assert math.isclose(limiter.limit(0.21 + SETTLED_S), 60, abs_tol=1)
    assert limiter.limit(30.0) == 100


def test_a_long_retry_after_pauses_all_new_requests():
    limiter = ProbeLimiter(10)
    first, second = limiter.try_start(0.0), limiter.try_start(0.0)
    assert first is not None
    assert second is not None
    limiter.refuse(first, 0.1, retry_after_s=10.0)
    limiter.refuse(second, 0.1, retry_after_s=3600.0)
    limiter.limit(1.0)
    assert limiter.try_start(MAX_PAUSE_S) is None
    assert limiter.try_start(MAX_PAUSE_S + 0.2) is not None
