"""Generation killed without warning, again and again: nothing missing, nothing twice, nothing paid twice.

Run as a script, this file is the process that gets killed: `python test_generation_crash.py DIRECTORY`.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3.artifacts import RunDirectory, Stage, StageManifest
from eagle3.errors import BudgetReachedError, CreditsExhaustedError, StoppedError
from eagle3.formats import COMPLETIONS, prompt_to_json, read_rows, write_json_lines
from eagle3.generation import generate
from eagle3.generation.shards import prompt_shards, read_prompts
from eagle3.progress import Progress, ProgressEvent, no_progress
from eagle3.recipe import Recipe, load_recipe
from eagle3.records import PromptRecord, sample_id_of
from eagle3.simulator.process import SimulatorProcess

MODEL = "huggingfacetb/smollm2-135m-instruct"
DATASETS = ("first", "second")
SHARD_SAMPLES = 40
KEY = "sk-or-v1-planted-secret-0123456789"

SCENARIO: dict[str, Any] = {
    "name": "crash",
    "seed": 5,
    "time_scale": 0.1,
    "generation_lag_s": 0.2,
    "models": [{"id": MODEL, "suffix": "20241031"}],
    "providers": [
        {
            "name": name,
            "tag": f"{name.lower()}/bf16",
            "quantization": "bf16",
            "prompt_usd_per_mtok": price,
            "completion_usd_per_mtok": 2 * price,
            "latency": {"median_s": 2.0, "sigma": 0.5},
        }
        for name, price in (("Northwind", 0.4), ("Lakeside", 0.5))
    ],
    "faults": [
        {"kind": "http_429", "share": 0.02},
        {"kind": "http_502", "share": 0.02},
        {"kind": "cut_body", "share": 0.02},
        {"kind": "padding_only", "share": 0.02},
        {"kind": "dropped", "share": 0.02},
    ],
    "account": {"credits_usd": 50},
}


def build(root: Path, num_prompts: int, scenario: dict[str, Any] = SCENARIO, **generation: Any) -> None:
    """Write answers, scenario, sealed prompts and the recipe, whose server address is filled in later."""
    (root / "scenario.yaml").write_text(yaml.safe_dump(scenario), encoding="utf-8")
    answers: list[dict[str, Any]] = []
    stage = RunDirectory(root / "run").open_stage(Stage.PROMPTS, {}, {})
    shards = []
    for dataset in DATASETS:
        records: list[PromptRecord] = []
        for number in range(num_prompts):
            messages = ({"role": "user", "content": f"{dataset} prompt {number}"},)
            sample_id = sample_id_of(dataset, messages, (), 0)
            records.append(PromptRecord(sample_id=sample_id, dataset=dataset, prompt_id=str(number), messages=messages))
            length = random.Random(f"{dataset}-{number}").randrange(5, 60)
            answers.append(
                {
                    "messages": list(messages),
                    "prompt_ids": list(range(20)),
                    "output_ids": list(range(100, 100 + length)),
                    "text": f"answer to {dataset} {number}",
                    "finish_reason": "stop",
                }
            )
        for start in range(0, num_prompts, SHARD_SAMPLES):
            part = [prompt_to_json(record) for record in records[start : start + SHARD_SAMPLES]]
            shards.append(
                stage.commit_shard(
                    f"{dataset}/shard-{start // SHARD_SAMPLES:05d}.jsonl",
                    lambda path, part=part: write_json_lines(path, part),
                    num_samples=len(part),
                )
            )
    stage.seal(shards, {})
    write_json_lines(root / "answers.jsonl", answers)
    # Answers take a second at most, so a request that a kill left behind has ended after 17.
    waits = {"stop_grace_s": 5, "max_queue_s": 10, "min_tokens_per_s": 32}
    settings = {"budget_usd": "20", "in_flight": 40, **waits, **generation}
    recipe = {
        "name": "crash",
        "target": {"name": "t", "weights": {"kind": "directory", "path": "."}, "grammar": "none"},
        "prompts": {
            "datasets": [{"name": name, "path": "none", "sampling": {"max_tokens": 64}} for name in DATASETS],
            "shard_samples": SHARD_SAMPLES,
        },
        "generation": {
            "provider": {"kind": "openrouter", "model": MODEL, "api_key_env": "EAGLE3_TEST_KEY", "base_url": "unset"},
            **settings,
        },
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


@contextmanager
def server(root: Path) -> Iterator[SimulatorProcess]:
    with SimulatorProcess(root / "scenario.yaml", [root / "answers.jsonl"]) as process:
        yield process


def recipe_of(root: Path, process_url: str, *overrides: str) -> Recipe:
    return load_recipe(root / "recipe.yaml", [f"generation.provider.base_url={process_url}", *overrides])


def run_once(root: Path, url: str, *overrides: str, progress: Progress = no_progress) -> StageManifest:
    run = RunDirectory(root / "run")
    with run.locked():
        return generate(recipe_of(root, url, *overrides), run, root, progress)


def check_complete(root: Path, manifest: StageManifest) -> list[dict[str, Any]]:
    """Every prompt answered once, in prompt order, with its own answer."""
    run = RunDirectory(root / "run")
    rows: list[dict[str, Any]] = []
    for shard in manifest.shards:
        if shard.path.endswith(".parquet"):
            rows += read_rows(run.stage_path(Stage.COMPLETIONS) / shard.path, COMPLETIONS)
    wanted = [prompt for shard in prompt_shards(run.sealed(Stage.PROMPTS)) for prompt in read_prompts(run, shard)[0]]
    assert [row["sample_id"] for row in rows] == [prompt.sample_id for prompt in wanted]
    for row, prompt in zip(rows, wanted, strict=True):
        assert row["content"] == f"answer to {prompt.dataset} {prompt.prompt_id}"
    return rows


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("EAGLE3_TEST_KEY", KEY)


def test_killed_three_times_and_resumed(tmp_path):
    calm, crashed = tmp_path / "calm", tmp_path / "crashed"
    for root in (calm, crashed):
        root.mkdir()
        build(root, 200)
    with server(calm) as process:
        check_complete(calm, run_once(calm, process.base_url))
        calm_bill = Decimal(process.stats()["billed_usd"])
    rng = random.Random(11)
    with server(crashed) as process:
        for kill in range(3):
            child = subprocess.Popen([sys.executable, __file__, str(crashed), process.base_url])
            threshold = process.stats()["generations"] + rng.randrange(40, 100)
            while child.poll() is None and process.stats()["generations"] < threshold:
                time.sleep(0.01)
            assert child.poll() is None, f"the child ended before kill {kill}"
            child.send_signal(signal.SIGKILL)
            child.wait()
        manifest = run_once(crashed, process.base_url)
        rows = check_complete(crashed, manifest)
        stats, truth = process.stats(), process.truth()
    assert stats["paid_more_than_once"] == 0
    bill = Decimal(stats["billed_usd"])
    assert bill == calm_bill
    assert Decimal(manifest.stats["spent_usd"]) == bill
    assert Decimal(manifest.stats["spent_usd"]) <= Decimal(manifest.stats["budget_usd"])
    assert sum((row["cost_usd"] for row in rows), Decimal(0)) == bill
    assert len(truth) >= len(rows)


def test_credits_run_out_and_a_top_up_continues(tmp_path):
    scenario = {**SCENARIO, "account": {"credits_usd": "0.004"}}
    build(tmp_path, 120, scenario)
    with server(tmp_path) as process:
        with pytest.raises(CreditsExhaustedError, match="run again"):
            run_once(tmp_path, process.base_url)
        assert Decimal(process.stats()["billed_usd"]) > 0
        process.topup(Decimal(10))
        manifest = run_once(tmp_path, process.base_url)
        check_complete(tmp_path, manifest)
        assert Decimal(manifest.stats["spent_usd"]) == Decimal(process.stats()["billed_usd"])
        assert process.stats()["paid_more_than_once"] == 0


def test_a_key_limit_pauses_too(tmp_path):
    build(tmp_path, 60)
    with server(tmp_path) as process:
        process.set_key_limit(Decimal("0.002"))
        with pytest.raises(CreditsExhaustedError):
            run_once(tmp_path, process.base_url)
        process.set_key_limit(None)
        check_complete(tmp_path, run_once(tmp_path, process.base_url))


def test_the_budget_is_never_passed_and_raising_it_continues(tmp_path):
    build(tmp_path, 120)
    with server(tmp_path) as process:
        with pytest.raises(BudgetReachedError, match="Raise generation"):
            run_once(tmp_path, process.base_url, "generation.budget_usd=0.005")
        bill = Decimal(process.stats()["billed_usd"])
        assert Decimal("0.003") < bill <= Decimal("0.005")
        manifest = run_once(tmp_path, process.base_url, "generation.budget_usd=1")
        check_complete(tmp_path, manifest)
        assert process.stats()["paid_more_than_once"] == 0


def test_a_stop_keeps_what_was_received(tmp_path):
    build(tmp_path, 200)
    with server(tmp_path) as process:
        signals: list[int] = []

        def stop_early(event: ProgressEvent) -> None:
            if event.done >= 20 and not signals:
                signals.append(signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(StoppedError, match="run again to continue"):
            run_once(tmp_path, process.base_url, "generation.in_flight=10", progress=stop_early)
        assert process.stats()["generations"] < 400
        check_complete(tmp_path, run_once(tmp_path, process.base_url))
        assert process.stats()["paid_more_than_once"] == 0


def test_the_key_is_nowhere(tmp_path):
    build(tmp_path, 40)
    with server(tmp_path) as process:
        run_once(tmp_path, process.base_url)
    found = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert found == []


def main() -> None:
    """Be the process that is killed."""
    root, url = Path(sys.argv[1]), sys.argv[2]
    manifest = run_once(root, url)
    print(json.dumps(manifest.stats))


if __name__ == "__main__":
    main()
