"""Planning, sealing and resuming the stage on disk; the network is not touched."""

import asyncio
import hashlib
import json
from decimal import Decimal

import pytest
from rich.console import Console

from eagle3.artifacts import RunDirectory, Stage, StageManifest
from eagle3.errors import RunRejectedError
from eagle3.formats import COMPLETIONS, completion_from_row, prompt_to_json, read_rows, write_json_lines
from eagle3.generation import GenerationSession, plan_cost, render_plan, seal_completions, settle_sealed
from eagle3.generation.aftermath import ask_the_books
from eagle3.generation.history import ACCOUNT, replay
from eagle3.generation.journal_lines import encode_line
from eagle3.generation.shards import (
    ENDPOINTS_NAME,
    open_completions,
    prompt_shards,
    prompt_token_bound,
    read_failures,
    write_shard,
)
from eagle3.generation.snapshots import keep_snapshot
from eagle3.providers.base import AccountUsage, Endpoint, GenerationRecord
from eagle3.recipe import Recipe, recipe_from_mapping
from eagle3.records import FailureClass, PromptRecord, sample_id_of

MICRO = Decimal("1e-6")
ENDPOINT = Endpoint(
    provider="Chutes", tag="chutes/int4", quantization="int4", prompt_usd=MICRO, completion_usd=2 * MICRO
)


BOUND = 8 + 64
"""Of a prompt of 7 tokens: 5 % and 64 tokens more."""


def prompts_of(count: int) -> list[PromptRecord]:
    records: list[PromptRecord] = []
    for number in range(count):
        messages = ({"role": "user", "content": f"prompt {number}"},)
        sample_id = sample_id_of("d", messages, (), 0)
        records.append(PromptRecord(sample_id=sample_id, dataset="d", prompt_id=str(number), messages=messages))
    return records


def recipe_of(root, **generation: object) -> Recipe:
    document = {
        "name": "r",
        "target": {"name": "t", "weights": {"kind": "directory", "path": "."}, "grammar": "none"},
        "prompts": {"datasets": [{"name": "d", "path": "none", "sampling": {"max_tokens": 100}}]},
        "generation": {"provider": {"kind": "openrouter", "model": "m/m"}, "budget_usd": "1", **generation},
    }
    return recipe_from_mapping(document, root)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    stage = run.open_stage(Stage.PROMPTS, {}, {})
    rows = [{**prompt_to_json(record), "num_prompt_tokens": 7} for record in prompts_of(30)]
    shard = stage.commit_shard(
        "d/shard-00000.jsonl", lambda path: write_json_lines(path, rows), num_samples=30, stats={"prompt_tokens": 210}
    )
    dropped = stage.commit_shard("dropped.jsonl", lambda path: write_json_lines(path, []), num_samples=0)
    stage.seal([shard, dropped], {})
    return run


def answer_entry(prompt: PromptRecord, tokens: int = 40) -> list[dict[str, object]]:
    choice = {"message": {"content": " text ", "reasoning": None}, "finish_reason": "stop"}
    raw = json.dumps({"id": "g", "model": "m-1", "provider": "Chutes", "choices": [choice], "usage": {}})
    usage = {"prompt_tokens": 7, "completion_tokens": tokens, "reasoning_tokens": None, "cached_tokens": None}
    request = {"id": prompt.sample_id, "attempt": 1}
    intent = {"kind": "intent", **request, "reserved_usd": "0.01", "routing": "r", "sha256": "s", "time": 5.0}
    answer = {
        "kind": "answer",
        **request,
        "attempts": 1,
        "cost_usd": "0.0001",
        "charged_usd": "0.0001",
        "is_estimated": False,
        "usage": usage,
        "provider": "Chutes",
        "generation_id": "g-" + prompt.prompt_id,
        "paid_ids": ["g-" + prompt.prompt_id],
        "resolves": [],
        "from_cache": False,
        "latency_s": 1.5,
        "raw": raw,
    }
    return [intent, answer]


def failed_entry(prompt: PromptRecord, failure: FailureClass) -> dict[str, object]:
    return {"kind": "failed", "id": prompt.sample_id, "failure": failure.value, "message": "why", "attempts": 3}


def journal(run: RunDirectory, *entries: dict[str, object], folder: str = "d", number: int = 1) -> None:
    path = run.stage_path(Stage.COMPLETIONS) / folder / f"journal-{number:04d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(piece for entry in entries for piece in encode_line(dict(entry))))


def session_of(run: RunDirectory, recipe: Recipe) -> GenerationSession:
    session = GenerationSession(recipe, run, run.path)
    session.history, session.ledger = replay(session.stage.path, ["d"], Decimal(1))
    return session


def test_a_plan_counts_what_is_open_and_learns_lengths(run, tmp_path):
    recipe = recipe_of(tmp_path)
    fresh = plan_cost(recipe, run, [ENDPOINT])
    assert fresh.datasets[0].prompt_tokens == 30 * 7
    assert fresh.worst_usd == 30 * (BOUND * MICRO + 100 * 2 * MICRO)
    assert fresh.expected_usd < fresh.worst_usd
    assert not fresh.datasets[0].is_length_known
    journal(run, *(entry for prompt in prompts_of(20) for entry in answer_entry(prompt)))
    later = plan_cost(recipe, run, [ENDPOINT])
    assert later.datasets[0].num_answered == 20
    assert later.datasets[0].expected_tokens_per_answer == 40
    assert later.spent_usd == 20 * Decimal("0.0001")
    assert later.worst_usd == 10 * (BOUND * MICRO + 100 * 2 * MICRO)
    json.dumps(later.to_json())
    console = Console(width=200, record=True, file=None, quiet=True)
    console.print(render_plan(later))


def test_a_plan_warns_when_the_watch_holds_requests_back(run, tmp_path):
    recipe = recipe_of(tmp_path)
    reservation_usd = BOUND * MICRO + 100 * 2 * MICRO
    document = recipe.model_dump(mode="json")
    document["audit"]["max_at_risk_usd"] = f"{5 * reservation_usd:f}"
    plan = plan_cost(recipe_from_mapping(document, tmp_path), run, [ENDPOINT])
    assert plan.watched_at_once == 5
    (warning,) = (text for text in plan.warnings if "audit.max_at_risk_usd" in text)
    assert "at most 5 requests go out at once, 30 are wanted" in warning
    assert f"{30 * reservation_usd:.6f} USD" in warning
    document["audit"]["while_generating"] = False
    unwatched = plan_cost(recipe_from_mapping(document, tmp_path), run, [ENDPOINT])
    assert unwatched.watched_at_once is None
    assert not any("audit" in text for text in unwatched.warnings)


def test_a_plan_warns_when_the_budget_starves_the_slots(run, tmp_path):
    plan = plan_cost(recipe_of(tmp_path, budget_usd="0.001"), run, [ENDPOINT])
    assert plan.requests_at_once == 3
    assert any("carries only 3 requests at once" in warning for warning in plan.warnings)
    assert any("will pause" in warning for warning in plan.warnings)


def test_the_bound_of_prompt_tokens_covers_every_byte():
    prompt = PromptRecord(
        sample_id="s", dataset="d", prompt_id="p", messages=({"role": "user", "content": "é\U0001f600" * 50},)
    )
    assert prompt_token_bound(prompt) >= 50 * 6


def test_a_sealed_stage_holds_every_answer_in_prompt_order(run, tmp_path):
    prompts = prompts_of(30)
    entries = [entry for prompt in reversed(prompts[1:]) for entry in answer_entry(prompt)]
    journal(run, *entries, failed_entry(prompts[0], FailureClass.REJECTED))
    session = session_of(run, recipe_of(tmp_path, max_failed_share=0.1))
    manifest = seal_completions(session)
    rows = read_rows(run.stage_path(Stage.COMPLETIONS) / manifest.shards[0].path, COMPLETIONS)
    completions = [completion_from_row(row) for row in rows]
    assert [completion.sample_id for completion in completions] == [prompt.sample_id for prompt in prompts[1:]]
    assert completions[0].content == " text "
    assert completions[0].cost_usd == Decimal("0.0001")
    assert hashlib.sha256(completions[0].raw_body).digest()
    (failure,) = read_failures(run.stage_path(Stage.COMPLETIONS) / "failed.jsonl")
    assert (failure.sample_id, failure.failure) == (prompts[0].sample_id, FailureClass.REJECTED)
    assert manifest.stats["samples"] == 29
    assert manifest.stats["datasets"]["d"]["failed"] == 1
    assert open_completions(recipe_of(tmp_path, budget_usd="9"), run).manifest is not None


def test_a_shard_that_is_first_written_at_sealing_names_the_precision_of_its_providers(run, tmp_path):
    keep_snapshot(run.stage_path(Stage.COMPLETIONS) / ENDPOINTS_NAME, [ENDPOINT])
    journal(run, *(entry for prompt in prompts_of(30) for entry in answer_entry(prompt)))
    manifest = seal_completions(session_of(run, recipe_of(tmp_path)))
    rows = read_rows(run.stage_path(Stage.COMPLETIONS) / manifest.shards[0].path, COMPLETIONS)
    assert {row["quantization"] for row in rows} == {"int4"}


class Books:
    """A provider that is only asked what things cost."""

    answers_outlive_us = True
    usage_lag_s = 120.0

    def __init__(self, usage_usd: str, listed: dict[str, str]) -> None:
        self.usage_usd = Decimal(usage_usd)
        self.listed = listed

    async def account(self) -> AccountUsage:
        return AccountUsage(key_label="k", usage_usd=self.usage_usd, remaining_usd=None)

    async def find_generation(self, generation_id: str) -> GenerationRecord | None:
        cost = self.listed.get(generation_id)
        if cost is None:
            return None
        return GenerationRecord(
            generation_id=generation_id,
            cost_usd=Decimal(cost),
            prompt_tokens=7,
            completion_tokens=40,
            reasoning_tokens=None,
            provider="Chutes",
        )


def sealed_in_doubt(run: RunDirectory, recipe: Recipe) -> StageManifest:
    """30 answers for a hundredth of a cent each; of two lost first requests one has a name, the other has none."""
    prompts = prompts_of(30)
    lost = [answer_entry(prompt)[0] for prompt in prompts[:2]]
    named = {"kind": "accepted", "requests": [[prompts[0].sample_id, 1, "g-lost"]]}
    answers = [{**entry, "attempt": 2} for prompt in prompts for entry in answer_entry(prompt)]
    journal(
        run, {"kind": "baseline", "key_label": "k", "usage_usd": "5", "spent_usd": "0", "time": 1.0}, folder=ACCOUNT
    )
    journal(run, *lost, named, *answers)
    return seal_completions(session_of(run, recipe))


def test_money_in_doubt_is_told_at_sealing_and_settled_afterwards(run, tmp_path):
    recipe = recipe_of(tmp_path)
    manifest = sealed_in_doubt(run, recipe)
    assert [manifest.stats[key] for key in ("spent_usd", "held_usd", "held_requests", "at_most_usd")] == [
        "0.0030",
        "0.02",
        2,
        "0.0230",
    ]
    books = Books("5.0095", {"g-lost": "0.004"})
    early = asyncio.run(ask_the_books(books, recipe, open_completions(recipe, run), {"d": 30}, now_s=30.0))
    assert early is not None
    assert [early.stats[key] for key in ("spent_usd", "held_usd", "at_most_usd")] == ["0.0070", "0.01", "0.0170"]
    late = asyncio.run(ask_the_books(books, recipe, open_completions(recipe, run), {"d": 30}, now_s=300.0))
    assert late is not None
    assert Decimal(late.stats["held_usd"]) == 0
    assert abs(Decimal(late.stats["spent_usd"]) - Decimal("0.0095")) < MICRO
    assert late.digest == manifest.digest
    stored = open_completions(recipe, run).manifest
    assert stored is not None
    assert stored.stats == late.stats
    _, ledger = replay(run.stage_path(Stage.COMPLETIONS), ["d"], Decimal(1))
    assert (f"{ledger.spent_usd:f}", ledger.held_usd) == (late.stats["spent_usd"], 0)


def test_a_sealed_stage_in_doubt_is_reused_without_a_key(run, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    recipe = recipe_of(tmp_path)
    manifest = sealed_in_doubt(run, recipe)
    found = settle_sealed(recipe, run, tmp_path)
    assert found is not None
    assert (found.digest, found.stats) == (manifest.digest, manifest.stats)


def test_too_many_failures_are_not_sealed_and_those_that_may_work_are_reopened(run, tmp_path):
    prompts = prompts_of(30)
    journal(
        run,
        *(entry for prompt in prompts[4:] for entry in answer_entry(prompt)),
        *(failed_entry(prompt, FailureClass.RETRIES_EXHAUSTED) for prompt in prompts[:3]),
        failed_entry(prompts[3], FailureClass.REJECTED),
    )
    session = session_of(run, recipe_of(tmp_path))
    with pytest.raises(RunRejectedError, match=r"4 of 30 samples failed \(rejected 1, retries_exhausted 3\)"):
        seal_completions(session)
    assert session.stage.manifest is None
    assert session.history.reopen_failures() == 3
    assert not session.history.sample(prompts[0].sample_id).is_final
    assert session.history.sample(prompts[3].sample_id).is_final
    journal(run, *(entry for prompt in prompts[:3] for entry in answer_entry(prompt)), number=2)
    later = session_of(run, recipe_of(tmp_path, max_failed_share=0.1))
    assert seal_completions(later).stats["failed"] == 1


def test_a_shard_of_reopened_samples_is_not_taken_for_finished(run, tmp_path):
    prompts = prompts_of(30)
    journal(run, *(entry for prompt in prompts[1:] for entry in answer_entry(prompt)))
    session = session_of(run, recipe_of(tmp_path))
    (shard,) = prompt_shards(run.sealed(Stage.PROMPTS))
    first = write_shard(session.stage, shard, prompts, session.history, {})
    journal(run, *answer_entry(prompts[0]), number=2)
    manifest = seal_completions(session_of(run, recipe_of(tmp_path)))
    assert first.num_samples == 29
    assert manifest.shards[0].num_samples == 30


def test_requests_without_an_outcome_are_held_until_the_account_explains_them(run):
    prompt = prompts_of(1)[0]
    intent = answer_entry(prompt)[0]
    journal(run, intent)
    _, ledger = replay(run.stage_path(Stage.COMPLETIONS), ["d"], Decimal(1))
    assert (ledger.spent_usd, ledger.held_usd) == (0, Decimal("0.01"))
    ended = {"kind": "reconciled", "charged_usd": "0.004", "ended_holds": [[prompt.sample_id, 1]]}
    journal(run, ended, folder=ACCOUNT)
    history, ledger = replay(run.stage_path(Stage.COMPLETIONS), ["d"], Decimal(1))
    assert (ledger.spent_usd, ledger.held_usd) == (Decimal("0.004"), 0)
    assert history.sample(prompt.sample_id).intent is not None


def test_snapshots_are_kept_when_they_differ(tmp_path):
    path = tmp_path / "endpoints.json"
    assert keep_snapshot(path, [ENDPOINT]) == (ENDPOINT,)
    assert keep_snapshot(path, [ENDPOINT]) == (ENDPOINT,)
    other = Endpoint(provider="B", tag="b/fp8", quantization="fp8", prompt_usd=MICRO, completion_usd=MICRO)
    assert keep_snapshot(path, [other]) == (other, ENDPOINT)
