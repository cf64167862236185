import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Failed

from eagle3.artifacts import RunDirectory, Stage
from eagle3.errors import AuditFailedError, RetryableProviderError
from eagle3.progress import ProgressEvent
from tasks.caching import fresh, is_retryable, stage_cache_key
from tasks.job import Job, StageRef
from tasks.progress import artifact_key, describe

RECIPE = """
name: unit
target: {name: T, weights: {kind: directory, path: .}, grammar: smollm}
prompts: {datasets: [{name: code, path: code.jsonl}]}
generation: {provider: {kind: openrouter, model: m/m}, budget_usd: 1}
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    return Job(recipe_path=str(recipe), run_root=str(tmp_path / "runs"))


def seal(job: Job, identity: dict[str, Any]) -> StageRef:
    stage = job.run.open_stage(Stage.AUDIT, identity, {})
    shard = stage.commit_shard("report.json", lambda path: path.write_text("{}") and None, num_samples=3)
    return StageRef.of(stage.seal([shard], {"verdict": "passed", "counts": {"A01": 1}}))


def test_reference_holds_small_figures_only(job: Job) -> None:
    reference = seal(job, {"a": 1})
    assert reference.num_samples == 3
    assert reference.stats == {"verdict": "passed"}
    assert reference.is_current(job.run)


def test_reference_is_stale_when_the_stage_was_made_anew_or_is_gone(job: Job) -> None:
    reference = seal(job, {"a": 1})
    job.run.discard([Stage.AUDIT])
    assert not reference.is_current(job.run)
    seal(job, {"a": 2})
    assert not reference.is_current(job.run)


class RecordedTask:
    """Answers like a cached Prefect task: a remembered reference first, a new one when told to refresh."""

    def __init__(self, remembered: StageRef, made: StageRef) -> None:
        self.remembered, self.made, self.refreshed = remembered, made, False

    def __call__(self, job: Job, *arguments: Any) -> StageRef:
        return self.made if self.refreshed else self.remembered

    def with_options(self, *, refresh_cache: bool) -> "RecordedTask":
        self.refreshed = refresh_cache
        return self


def test_cached_reference_that_matches_the_disk_is_used(job: Job) -> None:
    reference = seal(job, {"a": 1})
    task: Any = RecordedTask(reference, StageRef(stage="4-audit", digest="new", num_samples=0, stats={}))
    assert fresh(task, job) == reference


def test_cached_reference_whose_files_are_gone_is_redone(job: Job) -> None:
    reference = seal(job, {"a": 1})
    made = StageRef(stage="4-audit", digest="new", num_samples=0, stats={})
    job.run.discard([Stage.AUDIT])
    task: Any = RecordedTask(reference, made)
    assert fresh(task, job) == made


def test_cache_key_changes_with_recipe_upstream_and_run_directory(job: Job, tmp_path: Path) -> None:
    context: Any = SimpleNamespace(task=SimpleNamespace(name="audit"))
    upstream = StageRef(stage="3-token-samples", digest="d1", num_samples=1, stats={})
    other = StageRef(stage="3-token-samples", digest="d2", num_samples=1, stats={})
    keys = {
        stage_cache_key(context, {"job": job, "upstream": upstream}),
        stage_cache_key(context, {"job": job, "upstream": other}),
        stage_cache_key(context, {"job": _with(job, overrides=("training.epochs=9",)), "upstream": upstream}),
        stage_cache_key(context, {"job": _with(job, run_root=str(tmp_path / "elsewhere")), "upstream": upstream}),
    }
    assert len(keys) == 4
    raised = _with(job, overrides=("generation.budget_usd=99",))
    assert stage_cache_key(context, {"job": raised, "upstream": upstream}) in keys


def test_cache_key_changes_when_a_file_is_edited_in_place(job: Job, tmp_path: Path) -> None:
    context: Any = SimpleNamespace(task=SimpleNamespace(name="prompts"))
    prompts, tokenizer = tmp_path / "code.jsonl", tmp_path / "tokenizer.json"
    keys: set[str] = set()
    for content in ("one", "two"):
        prompts.write_text(content)
        keys.add(stage_cache_key(context, {"job": _with(job), "target": str(tmp_path)}))
    tokenizer.write_text("{}")
    keys.add(stage_cache_key(context, {"job": _with(job), "target": str(tmp_path)}))
    assert len(keys) == 3


def _with(job: Job, **changes: Any) -> Job:
    return Job(**{"recipe_path": job.recipe_path, "run_root": job.run_root, **changes})


@pytest.mark.parametrize(
    ("error", "expected"),
    [(RetryableProviderError("503"), True), (AuditFailedError("A05"), False), (ValueError("bug"), False)],
)
def test_only_errors_that_say_so_are_retried(error: Exception, expected: bool) -> None:
    unused: Any = None
    state = Failed(message=str(error), data=error)
    assert asyncio.run(is_retryable(unused, unused, state)) is expected


def test_artifact_keys_have_the_only_characters_the_server_takes() -> None:
    assert artifact_key("progress", "Tiny_CPU v2", "generate--Code!") == "progress-tiny-cpu-v2-generate-code"


def test_description_begins_with_what_the_card_has_room_for() -> None:
    event = ProgressEvent(
        stage="generate",
        label="code",
        done=120,
        total=480,
        values={"spent_usd": 12.345, "budget_usd": 100.0, "held_usd": 1.878e-05, "in_flight": 2000, "rate_limited": 30},
    )
    text = describe(event, 1.5)
    assert text == (
        "120/480 · $12.35 of $100 · 4 min 0 s left · 1.5 samples per s · 429: 20% · held $0.0000188 · in flight 2,000"
    )
    assert "of $100" in text[:32]


def test_description_of_work_of_unknown_length() -> None:
    assert describe(ProgressEvent(stage="prompts", done=1200, total=0, unit="prompts"), 3.0) == (
        "1,200 · 3 prompts per s"
    )


def test_run_directory_is_named_by_the_recipe(job: Job) -> None:
    assert isinstance(job.run, RunDirectory)
    assert job.run.path.name == job.recipe.run_name
