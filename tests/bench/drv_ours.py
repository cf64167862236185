"""Our generation stage as a driver of a race of chat clients: same arguments, same prompts, one JSON line at the end.

    python tests/bench/drv_ours.py --base-url http://127.0.0.1:18080/v1 -n 5000 -c 2000 --out DIR [--resume]

Prompts carry a tag `[[r000000]]` so that a fake server can count what each one cost. All is real: journal with synced
intents and outcomes, ledger, limiter, Parquet shards, manifest. Prints `rows`, the answers in the sealed stage.
"""

import argparse
import itertools
import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from eagle3.artifacts import RunDirectory, Stage
from eagle3.formats import prompt_to_json, write_json_lines
from eagle3.generation import generate
from eagle3.recipe import Recipe, recipe_from_mapping
from eagle3.records import PromptRecord, sample_id_of

DATASET = "race"
SHARD_SAMPLES = 500
WORDS = [
    "write",
    "a",
    "function",
    "that",
    "sorts",
    "the",
    "list",
    "and",
    "returns",
    "the",
    "index",
    "of",
    "each",
    "value",
    "then",
    "explain",
    "the",
    "cost",
    "in",
    "memory",
    "and",
    "time",
]


def prompts(count: int, dataset: str = DATASET) -> list[PromptRecord]:
    """Return tagged prompts of about 180 tokens."""
    rng = random.Random(1)
    records: list[PromptRecord] = []
    for number in range(count):
        text = f"[[{dataset[0]}{number:06d}]] " + " ".join(rng.choices(WORDS, k=150))
        messages = ({"role": "user", "content": text},)
        sample_id = sample_id_of(dataset, messages, (), 0)
        records.append(PromptRecord(sample_id=sample_id, dataset=dataset, prompt_id=str(number), messages=messages))
    return records


def seal_prompts(run: RunDirectory, records: Sequence[PromptRecord]) -> None:
    """Write the prompts stage."""
    stage = run.open_stage(Stage.PROMPTS, {}, {})
    if stage.manifest is not None:
        return
    shards, datasets = [], {}
    for dataset, group in itertools.groupby(records, key=lambda record: record.dataset):
        own = list(group)
        datasets[dataset] = {"prompts": len(own), "prompt_tokens": 180 * len(own)}
        for start in range(0, len(own), SHARD_SAMPLES):
            part = [prompt_to_json(record) for record in own[start : start + SHARD_SAMPLES]]
            shards.append(
                stage.commit_shard(
                    f"{dataset}/shard-{start // SHARD_SAMPLES:05d}.jsonl",
                    lambda path, part=part: write_json_lines(path, part),
                    num_samples=len(part),
                    stats={"dataset": dataset, "prompt_tokens": 180 * len(part)},
                )
            )
    stage.seal(shards, {"datasets": datasets})


def recipe_for(
    base_url: str, model: str, in_flight: int, directory: Path, datasets: Sequence[str] = (DATASET,)
) -> Recipe:
    """Return a recipe that asks an OpenAI-compatible server."""
    document = {
        "name": "race",
        "target": {"name": model, "weights": {"kind": "directory", "path": "."}, "grammar": "none"},
        "prompts": {
            "datasets": [{"name": name, "path": "none", "sampling": {"max_tokens": 2048}} for name in datasets]
        },
        "generation": {
            "provider": {
                "kind": "openai",
                "base_url": base_url,
                "model": model,
                "return_token_ids": False,
                "prompt_price_usd_per_mtok": "0.6",
                "completion_price_usd_per_mtok": "2.2",
            },
            "budget_usd": "1000000",
            "in_flight": in_flight,
            "max_failed_share": 1.0,
        },
    }
    return recipe_from_mapping(document, directory)


def main() -> None:
    """Run once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://127.0.0.1:18080/v1")
    parser.add_argument("-n", type=int, default=5000)
    parser.add_argument("-c", type=int, default=2000)
    parser.add_argument("--out", default="/tmp/drv-ours")
    parser.add_argument("--model", default="gpt-4o-mini")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    root = Path(arguments.out).resolve()
    run = RunDirectory(root / "run")
    if not arguments.resume:
        shutil.rmtree(run.path, ignore_errors=True)
    seal_prompts(run, prompts(arguments.n))
    recipe = recipe_for(arguments.base_url, arguments.model, arguments.c, root)
    started_s = time.perf_counter()
    with run.locked():
        manifest = generate(recipe, run, root)
    elapsed_s = time.perf_counter() - started_s
    rows = sum(pq.read_metadata(path).num_rows for path in run.shard_paths(manifest) if path.suffix == ".parquet")
    print(
        json.dumps(
            {
                "driver": "ours",
                "rows": rows,
                "done_s": round(elapsed_s, 2),
                "failed": manifest.stats["failed"],
                "spent_usd": manifest.stats["spent_usd"],
                "peak_in_flight": manifest.stats["peak_in_flight"],
                "rate_limited": manifest.stats["rate_limited"],
            }
        )
    )


if __name__ == "__main__":
    main()
