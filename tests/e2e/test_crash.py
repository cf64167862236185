"""Killed with SIGKILL at several points and resumed: same corpus, same spend, nothing twice, no key anywhere."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eagle3.simulator.process import SimulatorProcess
from tests.e2e.command_line import PROJECT, RECIPE, CommandLine, overrides

pytestmark = pytest.mark.slow

KEY_NAME = "EAGLE3_TEST_KEY"
PLANTED_KEY = "sk-or-v1-planted-key-that-must-never-be-written-5c2f"
SCENARIO = PROJECT / "deployments" / "scenarios" / "demo.yaml"
ANSWERS = PROJECT / "examples" / "answers" / "smollm2-135m-instruct.jsonl"
SAMPLES = 3 * 60


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_NAME, PLANTED_KEY)


@pytest.fixture
def look_alike() -> Generator[SimulatorProcess]:
    with SimulatorProcess(SCENARIO, [ANSWERS], time_scale=0.5) as process:
        yield process


def arguments(root: Path, look_alike: SimulatorProcess, *extra: str) -> list[str]:
    provider = (
        f"{{kind: openrouter, base_url: '{look_alike.base_url}', api_key_env: {KEY_NAME}, "
        "model: huggingfacetb/smollm2-135m-instruct}"
    )
    settings = [
        f"generation.provider={provider}",
        # Half a minute after a kill all its requests have ended; the look-alike's slowest answer takes ten seconds.
        "generation.max_queue_s=15",
        "generation.min_tokens_per_s=100",
        "prompts.shard_samples=40",
        "corpus.validation_samples=9",
        *(f"prompts.datasets.{index}.max_samples=60" for index in range(3)),
    ]
    return ["run", str(RECIPE), "--run-root", str(root), "--until", "corpus", *overrides(settings), *extra]


def journal_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*/2-completions/*/journal-*.jsonl"))


def sealed(root: Path, stage: str) -> bool:
    return any(root.glob(f"*/{stage}/manifest.json"))


@dataclass(frozen=True)
class Moment:
    """When to kill."""

    name: str
    has_come: Callable[[Path], bool]


def kill_when(process: subprocess.Popen[bytes], moment: Moment, root: Path) -> bool:
    """Kill the whole process group when the moment comes; False when the run ended before."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        if moment.has_come(root):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.02)
    raise AssertionError(f"the moment {moment.name!r} never came")


MOMENTS = [
    Moment("requests are under way", lambda root: journal_bytes(root) > 20_000),
    Moment("a third is answered", lambda root: journal_bytes(root) > 150_000),
    Moment("two thirds are answered", lambda root: journal_bytes(root) > 300_000),
    Moment("completions are sealed", lambda root: sealed(root, "2-completions")),
    Moment("token samples are sealed", lambda root: sealed(root, "3-token-samples")),
]


def test_killed_and_resumed_equals_uninterrupted(
    eagle3: CommandLine, look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    whole = eagle3.json(*arguments(tmp_path / "whole", look_alike, "--json"))
    bill = Decimal(look_alike.stats()["billed_usd"])
    assert Decimal(whole["spent_usd"]) == bill
    look_alike.reset()

    root = tmp_path / "killed"
    killed = [moment.name for moment in MOMENTS if kill_when(eagle3.start(*arguments(root, look_alike)), moment, root)]
    resumed = eagle3.json(*arguments(root, look_alike, "--json"))

    assert len(killed) >= 4, killed
    assert resumed["samples"] == whole["samples"] == SAMPLES
    assert resumed["corpus_digest"] == whole["corpus_digest"]
    assert Decimal(resumed["spent_usd"]) == Decimal(whole["spent_usd"])
    assert Decimal(look_alike.stats()["billed_usd"]) <= Decimal(resumed["budget_usd"])
    paid_answers = _paid_answers(look_alike.truth())
    assert len(paid_answers) == SAMPLES, "a prompt is missing from the bill"
    finished_twice = [key for key, count in paid_answers.items() if count > 1]
    assert not finished_twice, f"paid twice: {finished_twice[:5]}"


def _paid_answers(truth: dict[str, dict[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for generation in truth.values():
        if Decimal(generation["cost_usd"]) > 0:
            counts[generation["messages_key"]] = counts.get(generation["messages_key"], 0) + 1
    return counts


def test_out_of_credits_pauses_with_exit_code_3_and_a_top_up_continues(
    eagle3: CommandLine, look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    look_alike.set_key_limit(Decimal("0.0002"))
    root = tmp_path / "runs"
    stopped = eagle3(*arguments(root, look_alike))
    assert stopped.returncode == 3, stopped.stderr[-3000:]
    status = eagle3.json("status", str(root / "latest"), "--json")
    assert {stage["stage"]: stage["state"] for stage in status["stages"]}["5-corpus"] == "not started"
    look_alike.set_key_limit(None)
    summary = eagle3.json(*arguments(root, look_alike, "--json"))
    assert summary["samples"] == SAMPLES
    assert Decimal(summary["spent_usd"]) == Decimal(look_alike.stats()["billed_usd"])


def test_budget_pauses_with_exit_code_3_and_is_never_overshot(
    eagle3: CommandLine, look_alike: SimulatorProcess, tmp_path: Path
) -> None:
    budget = Decimal("0.0003")
    stopped = eagle3(*arguments(tmp_path, look_alike, "--set", f"generation.budget_usd={budget}"))
    assert stopped.returncode == 3, stopped.stderr[-3000:]
    assert "budget" in stopped.stderr
    assert 0 < Decimal(look_alike.stats()["billed_usd"]) <= budget


def test_the_key_is_written_nowhere(eagle3: CommandLine, look_alike: SimulatorProcess, tmp_path: Path) -> None:
    """A run with failures, then a search through run directory, server database, results, logs and output."""
    look_alike.set_key_limit(Decimal("0.0002"))
    done = eagle3(*arguments(tmp_path, look_alike))
    assert done.returncode == 3
    places = [path for root in (tmp_path, eagle3.home) for path in root.rglob("*") if path.is_file()]
    holders = [path.name for path in places if PLANTED_KEY.encode() in path.read_bytes()]
    assert not holders
    assert PLANTED_KEY not in done.stdout + done.stderr
