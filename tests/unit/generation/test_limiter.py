"""The limiter against simulated providers: hidden capacities, steps, rate caps and stray refusals."""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from eagle3.generation.limiter import (
    ANSWERS_PER_REFUSAL,
    MAX_PAUSE_S,
    MAX_REST_S,
    MAX_STEP_S,
    RAMP_PER_S,
    SETTLED_S,
    START_LIMIT,
    ProbeLimiter,
)

REJECT_S = 0.25
ANSWER_S = 20.0
SLOTS = 2000


@dataclass
class Result:
    done_s: float
    refused: int
    answers: int
    peak: int
    used_share: float
    """Of the capacity over the whole time."""

    @property
    def refused_per_answer(self) -> float:
        return self.refused / self.answers


@dataclass
class Bucket:
    """A cap on requests per second, whatever is under way."""

    per_s: float
    burst: float
    tokens: float = math.inf
    at_s: float = 0.0

    def takes(self, now_s: float) -> bool:
        self.tokens = min(self.burst, self.tokens + (now_s - self.at_s) * self.per_s)
        self.at_s = now_s
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


def simulate(
    num_requests: int,
    capacity: Callable[[float], int] = lambda now_s: SLOTS,
    *,
    bucket: Bucket | None = None,
    stray: float = 0.0,
    answer_s: float = ANSWER_S,
    reject_s: float = REJECT_S,
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
    now = used = allowed = 0.0
    heapq.heappush(events, (0.0, next(order), "tick", 0, 0))
    while answers < 0.95 * num_requests:
        earlier = now
        now, _, kind, ticket, request = heapq.heappop(events)
        most = min(capacity(earlier), slots)
        used += min(accepted, most) * (now - earlier)
        allowed += most * (now - earlier)
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
            is_stray = rng.random() < stray
            if accepted < capacity(now) and not is_stray and (bucket is None or bucket.takes(now)):
                accepted += 1
                wait = answer_s * rng.lognormvariate(-0.5 * 0.6**2, 0.6)
                heapq.heappush(events, (now + wait, next(order), "answer", started, request))
            else:
                heapq.heappush(events, (now + reject_s, next(order), "refusal", started, request))
    return Result(now, refused, answers, limiter.peak, used / allowed)


@pytest.mark.parametrize(
    ("capacity", "num_requests", "answer_s", "reject_s"),
    [
        (600, 12_000, 20.0, 0.25),
        (600, 12_000, 5.0, 0.02),
        (600, 12_000, 20.0, 0.8),
        (100, 3_000, 20.0, 0.25),
        (100, 3_000, 5.0, 0.02),
        (20, 600, 20.0, 0.25),
        (1500, 10_000, 60.0, 0.25),
    ],
)
def test_a_hidden_capacity_is_kept_full_with_few_refusals(
    capacity: int, num_requests: int, answer_s: float, reject_s: float
):
    result = simulate(num_requests, lambda now: capacity, answer_s=answer_s, reject_s=reject_s)
    assert result.used_share >= 0.92
    assert result.refused_per_answer <= 0.2


def test_a_capacity_that_falls_and_rises_is_followed():
    result = simulate(20_000, lambda now: 600 if now < 300 else 250 if now < 700 else 1000)
    assert result.used_share >= 0.95
    assert result.refused_per_answer <= 0.2


def test_a_fall_below_what_is_under_way_costs_few_refusals():
    """Every answer frees a place that the provider does not give again: it must not be asked for again and again."""
    result = simulate(3_000, lambda now: 600 if now < 10 else 100, answer_s=10.0, reject_s=0.01)
    assert result.refused <= 1_500


@pytest.mark.parametrize(
    ("per_s", "burst", "num_requests", "answer_s"), [(30, 60, 9_000, 20.0), (100, 100, 12_000, 5.0)]
)
def test_a_pure_rate_cap_is_used_well(per_s: float, burst: float, num_requests: int, answer_s: float):
    result = simulate(num_requests, bucket=Bucket(per_s, burst), answer_s=answer_s)
    assert result.answers / (per_s * result.done_s + burst) >= 0.8
    assert result.refused_per_answer <= 0.2


@pytest.mark.parametrize(
    ("slots", "num_requests", "answer_s", "share"),
    [(200, 4_000, 20.0, 0.9), (200, 4_000, 2.0, 0.9), (200, 4_000, 0.3, 0.7), (2000, 20_000, 20.0, 0.9)],
)
def test_stray_refusals_do_not_shrink_the_limit(slots: int, num_requests: int, answer_s: float, share: float):
    result = simulate(num_requests, stray=0.04, answer_s=answer_s, slots=slots)
    assert result.used_share >= share


def started(limiter: ProbeLimiter, count: int, now_s: float) -> list[int]:
    tickets = [limiter.try_start(now_s) for _ in range(count)]
    assert None not in tickets
    return [ticket for ticket in tickets if ticket is not None]


def fill(limiter: ProbeLimiter, from_s: float, until_s: float) -> None:
    """Start whatever is admitted, as often as the engine looks."""
    for tick in range(int((until_s - from_s) / 0.05) + 1):
        while limiter.try_start(from_s + 0.05 * tick) is not None:
            pass


def test_without_refusals_the_limit_ramps_to_the_ceiling():
    limiter = ProbeLimiter(2000)
    fill(limiter, 0.0, 0.0)
    assert limiter.in_flight == START_LIMIT
    fill(limiter, 0.05, 3.0)
    assert 450 <= limiter.in_flight <= 520
    fill(limiter, 3.05, 6.0)
    assert limiter.in_flight == 2000


def test_a_limit_that_is_not_used_does_not_grow():
    limiter = ProbeLimiter(2000)
    started(limiter, 10, 0.0)
    for tick in range(400):
        limiter.limit(0.05 * tick)
    assert limiter.limit(20.0) == START_LIMIT


def test_a_loop_that_stood_still_does_not_jump():
    limiter = ProbeLimiter(2000)
    started(limiter, 64, 0.0)
    assert limiter.limit(30.0) <= 64 * math.exp(RAMP_PER_S * MAX_STEP_S)


def cut_to(carried: int, refused: int) -> ProbeLimiter:
    """Return a limiter that has just judged, at `1 + SETTLED_S` s."""
    limiter = ProbeLimiter(1000, carried + refused)
    for ticket in started(limiter, carried + refused, 0.0)[carried:]:
        limiter.refuse(ticket, 1.0)
    assert limiter.limit(1.0 + SETTLED_S) == carried
    return limiter


def test_a_refusal_leaves_what_was_carried_at_once():
    limiter = ProbeLimiter(100, 100)
    tickets = started(limiter, 100, 0.0)
    assert limiter.try_start(0.0) is None
    for ticket in tickets[60:]:
        limiter.refuse(ticket, 0.2)
    assert limiter.limit(0.2) == 60
    assert limiter.limit(0.21 + SETTLED_S) == 60


def test_a_place_that_is_not_given_again_is_not_asked_for_twice():
    limiter = ProbeLimiter(100, 100)
    tickets = started(limiter, 100, 0.0)
    limiter.refuse(tickets[0], 10.0)
    for ticket in tickets[1:11]:
        limiter.finish(ticket)
        limiter.refuse(started(limiter, 1, 10.1)[0], 10.1)
    assert limiter.try_start(10.2) is None
    assert limiter.limit(10.0 + SETTLED_S) == 89


def test_a_refusal_from_before_the_judgement_is_no_news():
    limiter = cut_to(carried=60, refused=40)
    limiter.refuse(1, 1.9)
    assert limiter.limit(1.9) == 60


def test_a_cut_limit_rests_until_answers_paid_for_the_refusals():
    limiter = cut_to(carried=60, refused=40)
    fill(limiter, 1.8, 1.8 + MAX_REST_S - 1.0)
    assert limiter.in_flight == 60
    tickets = cut_to(carried=60, refused=1)
    fill(tickets, 1.8, 2.0)
    for ticket in range(1, int(ANSWERS_PER_REFUSAL) + 1):
        tickets.finish(ticket)
    fill(tickets, 2.0, 4.0)
    assert tickets.in_flight > 60


def test_after_a_cut_growth_is_slow_at_first_and_then_as_fast_as_the_ramp():
    limiter = cut_to(carried=60, refused=40)
    limiter = cut_to(carried=100, refused=100)
    rested_s = 2.0 + SETTLED_S + MAX_REST_S
    fill(limiter, 1.8, rested_s)
    soon = limiter.in_flight
    fill(limiter, rested_s, rested_s + 1.0)
    later = limiter.in_flight
    assert later < 1.3 * soon
    fill(limiter, rested_s + 1.0, rested_s + 8.0)
    assert limiter.in_flight == 1000


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
