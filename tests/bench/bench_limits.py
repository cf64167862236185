"""The limiter live: the generation stage against a look-alike of limited capacity, over HTTP, in a process of its own.

    python -m tests.bench.bench_limits [--only hidden,small,step,rate] [--scale 1]

Cases: `hidden` refuses more than 600 in flight, `small` more than 100; `step` falls from 600 to 250 and rises to 1000;
`rate` takes 120 requests a second, whatever is in flight. Refusals take a quarter of a second, as from afar.

Goodput compares what was used with what the capacity allowed over the same time, from the first request until 95 % of
the answers are there: seconds that accepted requests filled, up to the capacity of each moment, or accepted requests
per second. The control is the same run told the capacity, so that next to nothing is refused: what it falls short of
the whole is not the limiter's (a capacity that changes, or is one of requests per second, cannot be told).
"""

import argparse
import copy
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from eagle3.progress import Progress, ProgressEvent, no_progress
from tests.e2e import test_generation_crash as crash

COUNTED_SHARE = 0.95
"""The last answers are the tail of their own lengths."""
BIN_S = 0.1
TRACE_S = 2.0
REFUSAL_S = 0.25
RATE = {"per_s": 120, "burst": 240}
STEPS = [{"after_s": 50, "max_in_flight": 250}, {"after_s": 100, "max_in_flight": 1000}]
CASES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "hidden": (12_000, {"capacity": 600}),
    "small": (2_000, {"capacity": 100}),
    "step": (17_000, {"capacity": 600, "capacity_steps": STEPS}),
    "rate": (12_000, {"rate": RATE}),
}
"""Prompts and the provider's limits."""


def scaled(limits: Mapping[str, Any], scale: float) -> Mapping[str, Any]:
    """Return the limits for a smaller provider; times stay."""
    found: dict[str, Any] = {}
    if "capacity" in limits:
        found["capacity"] = round(scale * limits["capacity"])
    if "capacity_steps" in limits:
        found["capacity_steps"] = [
            {**step, "max_in_flight": round(scale * step["max_in_flight"])} for step in limits["capacity_steps"]
        ]
    if "rate" in limits:
        found["rate"] = {"per_s": scale * limits["rate"]["per_s"], "burst": round(scale * limits["rate"]["burst"])}
    return found


def allowed_seconds(limits: Mapping[str, Any], until_s: float) -> Sequence[int]:
    """Return the capacity in each bin from the first request on."""
    steps: list[tuple[float, int]] = [(0.0, limits["capacity"])]
    steps += [(step["after_s"], step["max_in_flight"]) for step in limits.get("capacity_steps", ())]
    return [
        [most for after_s, most in steps if after_s <= number * BIN_S][-1] for number in range(int(until_s / BIN_S))
    ]


def goodput(limits: Mapping[str, Any], accepted: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the used share of what the limits allowed, and the seconds it is taken over.

    Args:
        limits: Of the provider.
        accepted: Start and end of each request that was answered, in seconds.
    """
    first_s = min(start_s for start_s, _ in accepted)
    ends = sorted(end_s - first_s for _, end_s in accepted)
    until_s = ends[int(COUNTED_SHARE * len(ends)) - 1]
    if "rate" in limits:
        started = sum(start_s - first_s <= until_s for start_s, _ in accepted)
        # Until the last request went out: afterwards nobody asks.
        asked_s = min(until_s, max(start_s - first_s for start_s, _ in accepted))
        return started / (limits["rate"]["per_s"] * asked_s + limits["rate"]["burst"]), until_s
    changes = [0] * (int(until_s / BIN_S) + 2)
    for start_s, end_s in accepted:
        for moment_s, change in ((start_s - first_s, 1), (end_s - first_s, -1)):
            changes[min(len(changes) - 1, int(moment_s / BIN_S))] += change
    allowed = allowed_seconds(limits, until_s)
    used = [min(busy, most) for busy, most in zip(itertools.accumulate(changes), allowed, strict=False)]
    return sum(used) / sum(allowed), until_s


class Trace:
    """Prints where a run stands every few seconds, to see what the limiter does."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._printed_s = -math.inf

    def __call__(self, event: ProgressEvent) -> None:
        now_s = time.perf_counter() - self._started_s
        if not event.label and now_s - self._printed_s >= TRACE_S:
            self._printed_s = now_s
            values = event.values
            print(f"{now_s:6.1f} s {values['in_flight']:>5} in flight {values['rate_limited']:>5} refused", flush=True)


def run(
    prompts: int, limits: Mapping[str, Any], asked: int, median_s: float, progress: Progress = no_progress
) -> dict[str, Any]:
    """Buy all answers once."""
    scenario = copy.deepcopy(crash.SCENARIO)
    scenario |= {"time_scale": 1.0, "faults": [], "account": {"credits_usd": 1000}}
    scenario["providers"] = scenario["providers"][:1]
    scenario["providers"][0] |= {"refusal_s": REFUSAL_S, "latency": {"median_s": median_s, "sigma": 0.4}, **limits}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        crash.build(root, prompts // 2, scenario, in_flight=asked)
        with crash.server(root) as process:
            before_s, started_s = time.process_time(), time.perf_counter()
            manifest = crash.run_once(root, process.base_url, progress=progress)
            wall_s, own_cpu_s = time.perf_counter() - started_s, time.process_time() - before_s
            server = psutil.Process(process.pid).cpu_times()
            truth = process.truth().values()
        rows = crash.check_complete(root, manifest)
    accepted = [(made["created_s"], made["created_s"] + made["latency_s"]) for made in truth]
    used, counted_s = goodput(limits, accepted)
    refused = manifest.stats["rate_limited"]
    return {
        "answers": len(rows),
        "lost": prompts - len(rows),
        "goodput": round(used, 3),
        "counted_s": round(counted_s, 1),
        "refused": refused,
        "refused_per_answer": round(refused / len(rows), 3),
        "paid_twice": manifest.stats["paid_twice"],
        "peak_in_flight": manifest.stats["peak_in_flight"],
        "own_cpu_share": round(own_cpu_s / wall_s, 2),
        "look_alike_cpu_share": round((server.user + server.system) / wall_s, 2),
    }


def main() -> None:
    """Measure each case, and the first one's control."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--asked", type=int, default=2000)
    parser.add_argument("--median-s", type=float, default=5.0)
    parser.add_argument("--scale", type=float, default=1.0, help="of prompts and limits; less for a busy machine")
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--trace", action="store_true", help="print requests in flight every few seconds")
    arguments = parser.parse_args()
    os.environ["EAGLE3_TEST_KEY"] = crash.KEY
    for name in arguments.only.split(","):
        prompts, limits = CASES[name]
        prompts, limits = 2 * round(arguments.scale * prompts / 2), scaled(limits, arguments.scale)
        progress = Trace() if arguments.trace else no_progress
        print(json.dumps({name: run(prompts, limits, arguments.asked, arguments.median_s, progress)}), flush=True)
        if list(limits) == ["capacity"] and not arguments.no_control:
            told = run(prompts, limits, limits["capacity"], arguments.median_s)
            print(json.dumps({f"{name}, control told the capacity": told}), flush=True)


if __name__ == "__main__":
    main()
