"""The limiter live: the generation stage against a look-alike that refuses more than a hidden number in flight.

    python -m tests.bench.bench_limits [--prompts 6000] [--capacity 600] [--asked 2000]

Goodput is the ideal time over the real one: all of the look-alike's answer times shared evenly by its capacity, to the
time until 95 % of the answers are there. The control is the same run told the capacity, so that nothing is refused:
what it falls short of the ideal is not the limiter's. Steps and rate caps: tests/unit/generation/test_limiter.py.
"""

import argparse
import copy
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from eagle3.progress import ProgressEvent
from tests.e2e import test_generation_crash as crash

COUNTED_SHARE = 0.95
"""The last answers are the tail of their own lengths."""


def run(prompts: int, capacity: int, asked: int, median_s: float) -> dict[str, Any]:
    """Buy all answers once."""
    scenario = copy.deepcopy(crash.SCENARIO)
    scenario |= {"time_scale": 1.0, "faults": [], "account": {"credits_usd": 1000}}
    scenario["providers"] = scenario["providers"][:1]
    scenario["providers"][0] |= {"capacity": capacity, "latency": {"median_s": median_s, "sigma": 0.4}}
    counted: list[float] = []

    def listen(event: ProgressEvent) -> None:
        if not event.label and event.done >= COUNTED_SHARE * prompts and not counted:
            counted.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        crash.build(root, prompts // 2, scenario, in_flight=asked)
        with crash.server(root) as process:
            started_s = time.perf_counter()
            manifest = crash.run_once(root, process.base_url, progress=listen)
            stats = process.stats()
        rows = crash.check_complete(root, manifest)
        ideal_s = COUNTED_SHARE * sum(row["latency_s"] for row in rows) / capacity
    return {
        "answers": len(rows),
        "lost": prompts - len(rows),
        "goodput": round(ideal_s / (counted[0] - started_s), 3),
        "refused_per_answer": round(manifest.stats["rate_limited"] / len(rows), 3),
        "most_in_flight_at_server": stats.get("peak_in_flight"),
    }


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=12_000)
    parser.add_argument("--capacity", type=int, default=600)
    parser.add_argument("--asked", type=int, default=2000)
    parser.add_argument("--median-s", type=float, default=5.0)
    arguments = parser.parse_args()
    os.environ["EAGLE3_TEST_KEY"] = crash.KEY
    results = {
        "hidden": run(arguments.prompts, arguments.capacity, arguments.asked, arguments.median_s),
        "control: told the capacity": run(
            arguments.prompts, arguments.capacity, arguments.capacity, arguments.median_s
        ),
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
