"""Generation killed at random points with hundreds of requests under way; and a budget that ends on the way.

    python -m tests.bench.bench_crash [--kills 20] [--prompts 14000] [--in-flight 1000]

Three runs against the look-alike, each held against its books: `cache` and `no cache` are killed with SIGKILL at random
points and resumed until complete, with and without the response cache; `top-up` asks for twice what budget and account
can pay, pauses for each, is topped up and resumed, and must cost what one pass costs. One JSON line each.

Without the cache an answer is paid twice when its request was under way at a kill, when a planted fault lost its reply,
or when its reply was there and not yet written. `finished_not_journaled` counts replies that the service had sent to
the end, read by us or not, and that the journal did not have after a kill; `finished_paid_twice`, of those it had sent,
the ones bought again.
"""

import argparse
import copy
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from eagle3.artifacts import RunDirectory, Stage
from eagle3.errors import BudgetReachedError, CreditsExhaustedError
from eagle3.generation.journal_lines import journal_paths, read_journal
from tests.e2e import test_generation_crash as crash

LATENCY_S = 8.0
MIN_IN_FLIGHT = 540
"""When a kill is decided; some end before it strikes."""


def _scenario(*, faults: bool, price: float = 1.0, latency_s: float = LATENCY_S) -> dict[str, Any]:
    scenario = copy.deepcopy(crash.SCENARIO)
    scenario["time_scale"] = 1.0
    for provider in scenario["providers"]:
        provider["latency"] = {"median_s": latency_s, "sigma": 0.4}
        provider["prompt_usd_per_mtok"] *= price
        provider["completion_usd_per_mtok"] *= price
    lost = [fault for fault in scenario["faults"] if not fault["kind"].startswith("http_")]
    scenario["faults"] = lost if faults else []  # refusals would only keep the slots from filling
    return scenario


def _provider(*, cache: bool) -> dict[str, Any]:
    return {
        "kind": "openrouter",
        "model": crash.MODEL,
        "api_key_env": "EAGLE3_TEST_KEY",
        "base_url": "unset",
        "response_cache": cache,
    }


def _killed(root: Path, kills: int, prompts: int, in_flight: int, *, cache: bool) -> dict[str, Any]:
    settings = {"in_flight": in_flight, "max_queue_s": 60, "provider": _provider(cache=cache)}
    crash.build(root, prompts // 2, _scenario(faults=True), **settings)
    rng = random.Random(29)
    at_kill: list[int] = []
    lives: list[_Life] = []
    with crash.server(root) as process:
        for _ in range(kills):
            started_s = time.time()
            child = subprocess.Popen([sys.executable, str(crash.__file__), str(root), process.base_url])
            threshold = process.stats()["generations"] + rng.randrange(1000)
            while child.poll() is None:
                stats = process.stats()
                if stats["in_flight"] >= MIN_IN_FLIGHT and stats["generations"] >= threshold:
                    break
                time.sleep(rng.uniform(0.005, 0.05))
            if child.poll() is not None:
                break
            at_kill.append(process.stats()["in_flight"])
            killed_s = time.time()
            child.send_signal(signal.SIGKILL)
            child.wait()
            lives.append(_Life(started_s, killed_s, _journaled(root)))
        manifest = crash.run_once(root, process.base_url)
        rows = crash.check_complete(root, manifest)
        stats, paid = process.stats(), [row for row in process.truth().values() if Decimal(row["cost_usd"])]
    return {
        "run": "cache" if cache else "no cache",
        "kills": len(at_kill),
        "least_in_flight_at_kill": min(at_kill, default=0),
        "in_flight_at_all_kills": sum(at_kill),
        "missing": prompts - len({row["sample_id"] for row in rows}),
        "duplicates": len(rows) - len({row["sample_id"] for row in rows}),
        "paid_more_than_once": stats["paid_more_than_once"],
        **_finished(lives, paid),
        "bill_usd": str(stats["billed_usd"]),
        "spent_usd": manifest.stats["spent_usd"],
        "held_usd": manifest.stats["held_usd"],
        "failed": manifest.stats["failed"],
    }


class _Life(NamedTuple):
    """One process, from its start to its kill."""

    started_s: float
    killed_s: float
    journaled: set[str]
    """Generations whose answers the journal had afterwards."""


def _journaled(root: Path) -> set[str]:
    stage = RunDirectory(root / "run").stage_path(Stage.COMPLETIONS)
    paths = [path for dataset in crash.DATASETS for path in journal_paths(stage / dataset)]
    entries = (entry for path in paths for _, entry in read_journal(path) if entry["kind"] == "answer")
    return {generation_id for entry in entries for generation_id in (entry["generation_id"], *entry["paid_ids"])}


def _finished(lives: Sequence[_Life], paid: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count replies that were sent to the end before a kill: those the journal missed, and those bought again."""
    last_paid_s: dict[str, float] = {}
    for row in paid:
        last_paid_s[row["messages_key"]] = max(row["created_s"], last_paid_s.get(row["messages_key"], 0.0))
    found = {"finished_before_kills": 0, "finished_not_journaled": 0, "finished_paid_twice": 0}
    for life in lives:
        for row in paid:
            ended_s = row["created_s"] + row["latency_s"]
            if row["fault"] is None and row["created_s"] >= life.started_s and ended_s <= life.killed_s:
                found["finished_before_kills"] += 1
                found["finished_not_journaled"] += row["id"] not in life.journaled
                found["finished_paid_twice"] += last_paid_s[row["messages_key"]] > row["created_s"]
    return found


def _topped_up(root: Path, prompts: int, in_flight: int) -> dict[str, Any]:
    """Buy answers that cost 29 dollars: first with a budget of 14, then with an account of 16, then to the end."""
    calm, tight = root / "calm", root / "tight"
    for folder, credits_usd in ((calm, "1000"), (tight, "16")):
        folder.mkdir()
        scenario = {**_scenario(faults=False, price=400.0, latency_s=1.0), "account": {"credits_usd": credits_usd}}
        crash.build(folder, prompts // 2, scenario, in_flight=in_flight, budget_usd="1000")
    with crash.server(calm) as process:
        crash.check_complete(calm, crash.run_once(calm, process.base_url))
        one_pass_usd = Decimal(process.stats()["billed_usd"])
    pauses: list[str] = []
    bills: list[Decimal] = []
    with crash.server(tight) as process:
        for override in ("generation.budget_usd=14", f"generation.budget_usd={one_pass_usd * 100}"):
            try:
                crash.run_once(tight, process.base_url, override)
            except (BudgetReachedError, CreditsExhaustedError) as exc:
                pauses.append(type(exc).__name__)
            bills.append(Decimal(process.stats()["billed_usd"]))
            if pauses[-1:] == ["CreditsExhaustedError"]:
                process.topup(Decimal(1000))
        manifest = crash.run_once(tight, process.base_url, f"generation.budget_usd={one_pass_usd * 100}")
        rows = crash.check_complete(tight, manifest)
        bill_usd = Decimal(process.stats()["billed_usd"])
        paid_twice = process.stats()["paid_more_than_once"]
    return {
        "run": "top-up",
        "asked": prompts,
        "one_pass_usd": str(one_pass_usd),
        "pauses": pauses,
        "bill_at_14_usd": str(bills[0]),
        "overshoot_usd": str(max(Decimal(0), bills[0] - 14)),
        "bill_usd": str(bill_usd),
        "spent_usd": manifest.stats["spent_usd"],
        "equals_one_pass": bill_usd == one_pass_usd,
        "rows": len(rows),
        "paid_more_than_once": paid_twice,
    }


def main() -> None:
    """Run all three and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=14000)
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--only", choices=["cache", "no-cache", "top-up"])
    args = parser.parse_args()
    os.environ["EAGLE3_TEST_KEY"] = crash.KEY
    for name in ("top-up", "cache", "no-cache"):
        if args.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            if name == "top-up":
                result = _topped_up(root, 2000, min(args.in_flight, 150))
            else:
                result = _killed(root, args.kills, args.prompts, args.in_flight, cache=name == "cache")
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
