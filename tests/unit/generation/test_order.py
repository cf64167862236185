"""All datasets share the slots, and the last answers arrive together."""

import heapq
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3.generation.history import Tally
from eagle3.generation.order import WaitingWork, pace_of

MEDIANS_S = {"a": 6.0, "b": 12.0, "c": 20.0, "d": 20.0, "e": 30.0, "f": 42.0}


def work(dataset: str, rank: float, latency_s: float = 0.0) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(dataset=dataset), rank=rank, latency_s=latency_s)


def waiting_samples(each: int, sigma: float, seed: int) -> list[Any]:
    rng = random.Random(seed)
    return [
        work(name, number / each, median_s * math.exp(sigma * rng.gauss(0.0, 1.0)))
        for name, median_s in MEDIANS_S.items()
        for number in range(each)
    ]


def makespan_s(samples: list[Any], slots: int) -> float:
    """Ask in the order of the queue, which learns from the answers."""
    tallies = {name: Tally() for name in MEDIANS_S}
    waiting = WaitingWork(tallies, lambda: slots)
    for sample in samples:
        waiting.push(sample)
    running: list[tuple[float, int, Any]] = []
    now_s, started = 0.0, 0
    while waiting or running:
        while waiting and len(running) < slots:
            sample = waiting.pop()
            started += 1
            heapq.heappush(running, (now_s + sample.latency_s, started, sample))
        now_s, _, sample = heapq.heappop(running)
        tallies[sample.plan.dataset].waited(sample.latency_s)
    return now_s


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_six_datasets_with_heavy_tails_end_close_to_the_ideal(seed: int):
    samples = waiting_samples(each=1400, sigma=0.6, seed=seed)
    slots = 200
    times = [sample.latency_s for sample in samples]
    ideal_s = max(sum(times) / slots, *times)
    assert makespan_s(samples, slots) <= 1.10 * ideal_s


def longest_first_s(samples: list[Any], slots: int) -> float:
    """Makespan of the order by known median, longest first."""
    free_at = [0.0] * slots
    for sample in sorted(samples, key=lambda sample: -MEDIANS_S[sample.plan.dataset]):
        heapq.heapreplace(free_at, free_at[0] + sample.latency_s)
    return max(free_at)


def test_with_very_heavy_tails_the_order_is_as_good_as_with_known_medians():
    """The ideal knows each answer's length; no order of datasets reaches it, and a single run is luck."""
    runs = [waiting_samples(each=1000, sigma=1.0, seed=seed) for seed in range(10)]
    ours_s = sum(makespan_s(samples, 150) for samples in runs)
    assert ours_s <= 1.04 * sum(longest_first_s(samples, 150) for samples in runs)


def test_one_dataset_after_another_is_far_from_the_ideal():
    samples = waiting_samples(each=1400, sigma=0.6, seed=1)
    one_by_one = sum(makespan_s([s for s in samples if s.plan.dataset == name], 200) for name in MEDIANS_S)
    assert one_by_one > 1.3 * sum(sample.latency_s for sample in samples) / 200


def test_without_known_lengths_datasets_stay_level():
    waiting = WaitingWork({}, lambda: 10)
    for name in "ab":
        for number in range(4):
            waiting.push(work(name, number / 4))
    assert [waiting.pop().rank for _ in range(8)] == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75]
    assert not waiting


def test_the_end_belongs_to_short_answers():
    tallies = {"short": Tally(), "long": Tally()}
    for _ in range(30):
        tallies["short"].waited(1.0)
        tallies["long"].waited(60.0)
    waiting = WaitingWork(tallies, lambda: 100)
    for name in ("short", "long"):
        for number in range(50):
            waiting.push(work(name, number / 50))
    assert [waiting.pop().plan.dataset for _ in range(100)] == ["long"] * 50 + ["short"] * 50


@pytest.mark.parametrize(
    ("slowest_s", "remaining_s", "pace"), [(0, 100, 1.0), (50, 100, 0.5), (200, 100, 0.0), (1, 0, 0.0)]
)
def test_the_pace_falls_with_the_share_of_the_slowest_answer(slowest_s: float, remaining_s: float, pace: float):
    assert pace_of(slowest_s, remaining_s) == pace
