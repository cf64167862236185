"""`eagle3 plan` and `eagle3 generate` on six datasets with 20,000 prompts, against the look-alike.

    python -m tests.bench.bench_six_datasets [-n 20000] [--in-flight 2000] [--keep DIR]

Writes prompts, recorded answers, a scenario with two providers and a recipe, then runs the commands as a person would:
progress, time left and spend go to the terminal. Prints what was bought, for how much, in which time. The control is
the plan: its expected and worst cost beside the bill.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from eagle3.recipe import load_recipe
from eagle3.simulator.scripted import Script
from eagle3.target import prepare_target
from tests.bench.drv_ours import WORDS

PROJECT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("EAGLE3_HOME", PROJECT / ".eagle3")).resolve()
DEMO = PROJECT / "deployments" / "recipes" / "tiny_cpu.yaml"
LENGTHS = {"maths": 60, "code": 120, "chat": 30, "science": 90, "writing": 160, "tools": 45}
"""Dataset and mean answer in words."""
MODEL = "bench/small"
SCENARIO = {
    "name": "six",
    "seed": 6,
    "models": [{"id": MODEL, "suffix": "1"}],
    "providers": [
        {
            "name": name,
            "tag": f"{name.lower()}/bf16",
            "quantization": "bf16",
            "prompt_usd_per_mtok": price,
            "completion_usd_per_mtok": 4 * price,
            "latency": {"median_s": 4.0, "sigma": 0.5, "per_token_s": 0.02},
        }
        for name, price in (("Northwind", 0.03), ("Lakeside", 0.025))
    ],
    "faults": [{"kind": "http_502", "share": 0.005}, {"kind": "http_429", "share": 0.01, "retry_after_s": 1}],
    "account": {"credits_usd": 1000},
}


def write_inputs(folder: Path, count: int, in_flight: int) -> Path:
    """Write everything that the recipe names; return the recipe."""
    rng = random.Random(6)
    demo = load_recipe(DEMO)
    script = Script(prepare_target(demo, HOME / "models"), demo.target.grammar)  # the look-alike loads ids quickly
    with (folder / "answers.jsonl").open("w") as answers:
        for name, length in LENGTHS.items():
            with (folder / f"{name}.jsonl").open("w") as prompts:
                for number in range(count // len(LENGTHS)):
                    text = f"Question {number} about {name}: " + " ".join(rng.choices(WORDS, k=30))
                    messages = [{"role": "user", "content": text}]
                    prompts.write(json.dumps({"id": f"{name}-{number}", "messages": messages}) + "\n")
                    num_words = max(4, int(length * rng.lognormvariate(0.0, 0.5)))
                    content = " ".join(rng.choices(WORDS, k=num_words))
                    said = {"messages": messages, "content": content, "finish_reason": "stop"}
                    ids = script.answer(said)
                    answer = {
                        "messages": messages,
                        "prompt_ids": ids.prompt_ids,
                        "output_ids": ids.output_ids,
                        "text": content,
                        "finish_reason": "stop",
                    }
                    answers.write(json.dumps(answer) + "\n")
    (folder / "scenario.yaml").write_text(yaml.safe_dump(SCENARIO))
    recipe = {
        "name": "six-datasets",
        "target": yaml.safe_load(DEMO.read_text())["target"],
        "prompts": {
            "datasets": [{"name": name, "path": f"{name}.jsonl", "sampling": {"max_tokens": 1024}} for name in LENGTHS]
        },
        "generation": {
            "provider": {
                "kind": "simulator",
                "model": MODEL,
                "scenario": "scenario.yaml",
                "answers": ["answers.jsonl"],
            },
            "budget_usd": 20,
            "in_flight": in_flight,
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def command(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run one command of ours; its terminal output goes through, its result is returned."""
    started_s = time.perf_counter()
    line = [
        sys.executable,
        "-c",
        "from eagle3.cli import main; main()",
        *arguments,
        "--run-root",
        str(folder / "runs"),
        "--json",
    ]
    environment = {**os.environ, "EAGLE3_HOME": str(HOME), "PYTHONPATH": str(PROJECT)}
    output = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return {"wall_s": round(time.perf_counter() - started_s, 1), "result": json.loads(output)}


def measure(folder: Path, count: int, in_flight: int) -> dict[str, Any]:
    """Plan, then generate."""
    recipe = str(write_inputs(folder, count, in_flight))
    plan = command(folder, "plan", recipe)
    done = command(folder, "generate", recipe)
    manifest = next((folder / "runs").glob("*/2-completions/manifest.json"))
    stats = json.loads(manifest.read_text())["stats"]
    return {
        "prompts": count // len(LENGTHS) * len(LENGTHS),
        "plan_wall_s": plan["wall_s"],
        "expected_usd": stats["planned_usd"]["expected"],
        "worst_usd": stats["planned_usd"]["worst"],
        "generate_wall_s": done["wall_s"],
        "samples": stats["samples"],
        "failed": stats["failed"],
        "spent_usd": stats["spent_usd"],
        "spent_is_within_worst": Decimal(stats["spent_usd"]) <= Decimal(stats["planned_usd"]["worst"]),
        "peak_in_flight": stats["peak_in_flight"],
        "rate_limited": stats["rate_limited"],
        "by_provider": {name: tally["cost_usd"] for name, tally in stats["by_provider"].items()},
        "by_dataset": {name: tally["cost_usd"] for name, tally in stats["datasets"].items()},
    }


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=2000)
    parser.add_argument("--keep", type=Path, help="write everything here and leave it")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        result = measure(arguments.keep.resolve(), arguments.n, arguments.in_flight)
    else:
        with tempfile.TemporaryDirectory() as name:
            result = measure(Path(name), arguments.n, arguments.in_flight)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
