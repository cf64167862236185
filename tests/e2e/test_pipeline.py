"""The tiny recipe at reduced size, through a real Prefect server, real HTTP, a real model and the real trainer."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command_line import RECIPE, CommandLine, overrides

pytestmark = pytest.mark.slow

SMALL = overrides(
    [
        "prompts.datasets.0.max_samples=24",
        "prompts.datasets.1.max_samples=24",
        "prompts.datasets.2.max_samples=24",
        "corpus.validation_samples=9",
        "hidden_states.gate_samples=8",
        "training.epochs=2",
        "training.draft_vocab_size=1024",
        "evaluation.max_prompts=6",
        "evaluation.max_new_tokens=24",
        "evaluation.min_acceptance_length=1.0",
    ]
)
"""Small enough for minutes, large enough that every gate has something to look at. The zero gate has its own test."""


@dataclass(frozen=True)
class FinishedRun:
    root: Path
    summary: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.root / "latest"

    def arguments(self) -> list[str]:
        return ["run", str(RECIPE), "--run-root", str(self.root), *SMALL]


@pytest.fixture(scope="module")
def finished(eagle3: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    root = tmp_path_factory.mktemp("runs")
    summary = eagle3.json("run", str(RECIPE), "--run-root", str(root), "--json", *SMALL)
    return FinishedRun(root, summary)


def test_a_run_makes_every_stage_and_says_what_it_made(finished: FinishedRun) -> None:
    summary = finished.summary
    assert summary["stages_made"] == [
        "prompts", "generate", "reconstruct", "audit", "corpus", "extract", "train", "evaluate", "export",
    ]  # fmt: skip
    assert summary["samples"] == 72
    assert summary["audit_verdict"] == "passed"
    assert float(summary["spent_usd"]) > 0
    assert summary["acceptance_length_untrained"] >= 1
    assert summary["acceptance_length_trained"] >= summary["acceptance_length_untrained"]
    assert (finished.path / "report.html").is_file()
    assert json.loads((finished.path / "summary.json").read_text())["corpus_digest"] == summary["corpus_digest"]


def test_exports_hold_every_tensor(finished: FinishedRun) -> None:
    for engine in ("sglang", "vllm"):
        folder = finished.path / "9-export" / engine
        assert (folder / "config.json").is_file()
        assert (folder / "model.safetensors").is_file()


def test_a_second_run_does_nothing_spends_nothing_and_says_so(eagle3: CommandLine, finished: FinishedRun) -> None:
    done = eagle3(*finished.arguments())
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Nothing to do" in done.stdout
    again = eagle3.json(*finished.arguments(), "--json")
    assert again["stages_made"] == []
    assert float(again["spent_now_usd"]) == 0
    assert again["corpus_digest"] == finished.summary["corpus_digest"]


def test_status_tells_every_stage_complete(eagle3: CommandLine, finished: FinishedRun) -> None:
    status = eagle3.json("status", str(finished.path), "--json")
    assert {stage["state"] for stage in status["stages"]} == {"complete"}


def test_another_setting_of_a_sealed_stage_is_refused_with_the_ways_on(
    eagle3: CommandLine, finished: FinishedRun
) -> None:
    done = eagle3(*finished.arguments(), "--set", "training.learning_rate=0.5")
    assert done.returncode == 1
    message = " ".join(done.stderr.split())
    assert "learning_rate" in message
    assert "--redo train" in message


def test_a_corrupted_shard_is_refused_with_what_to_do(
    eagle3: CommandLine, finished: FinishedRun, tmp_path: Path
) -> None:
    copy = tmp_path / "runs"
    shutil.copytree(finished.root, copy, symlinks=True)
    shard = next((copy / "latest" / "5-corpus" / "train").glob("*.parquet"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    shard.write_bytes(bytes(damaged))
    done = eagle3("run", str(RECIPE), "--run-root", str(copy), "--redo", "extract", *SMALL)
    assert done.returncode == 1
    message = " ".join(done.stderr.split())
    assert "5-corpus/train" in message
    assert "changed after it was sealed" in message
    assert "eagle3 corpus" in message


def test_a_typo_in_the_recipe_writes_nothing(eagle3: CommandLine, tmp_path: Path) -> None:
    done = eagle3("run", str(RECIPE), "--run-root", str(tmp_path / "runs"), "--set", "training.epoks=3")
    assert done.returncode == 2
    assert "training.epoks: unknown key" in done.stderr
    assert not (tmp_path / "runs").exists()
