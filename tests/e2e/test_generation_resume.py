"""A half-done dataset resumes: answers brought along, a token budget, streamed replies, and failures tried again."""

import time
from decimal import Decimal
from typing import Any

import httpx

from eagle3.artifacts import RunDirectory, Stage
from eagle3.formats import COMPLETIONS, read_rows, write_json_lines
from eagle3.generation import import_answers, reopen
from eagle3.generation.figures import book_figures
from eagle3.generation.history import replay
from eagle3.generation.journal_lines import encode_line
from eagle3.generation.shards import open_completions
from eagle3.records import IMPORTED_PROVIDER, FailureClass
from tests.e2e.test_generation_crash import (
    DATASETS,
    KEY,
    MODEL,
    SCENARIO,
    build,
    check_complete,
    recipe_of,
    run_once,
    server,
)

CALM: dict[str, Any] = {**SCENARIO, "faults": []}
STREAMED = "generation.provider.stream=true"
CAP = "prompts.datasets.0.max_completion_tokens=900"


def answers_of(root, dataset: str) -> list[dict[str, Any]]:
    stage = RunDirectory(root / "run").stage_path(Stage.COMPLETIONS)
    return [row for path in sorted((stage / dataset).glob("*.parquet")) for row in read_rows(path, COMPLETIONS)]


def wait_until_listed(base_url: str, generation_id: str) -> None:
    """The service's books are late: return when they show the generation."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        found = httpx.get(
            f"{base_url}/generation",
            params={"id": generation_id},
            headers={"authorization": f"Bearer {KEY}"},
            timeout=30,
        )
        if found.status_code == 200:
            return
        time.sleep(0.01)
    raise AssertionError(f"generation {generation_id} was never listed")


def test_imported_answers_count_and_a_raised_token_budget_buys_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_TEST_KEY", KEY)
    build(tmp_path, 60, CALM)
    known = [
        {"id": str(number), "content": f"answer to first {number}", "usage": {"completion_tokens": 32}}
        for number in range(20)
    ]
    write_json_lines(tmp_path / "known.jsonl", known)
    with server(tmp_path) as process:
        run = RunDirectory(tmp_path / "run")
        recipe = recipe_of(tmp_path, process.base_url, CAP)
        assert import_answers(recipe, run, "first", tmp_path / "known.jsonl").imported == 20
        manifest = run_once(tmp_path, process.base_url, CAP, STREAMED)
        tally = manifest.stats["datasets"]["first"]
        assert 900 <= tally["completion_tokens"] < 900 + 60 * 5
        assert manifest.stats["left_out"] == {"first": 60 - tally["samples"], "second": 0}
        assert sum(row["provider"] == IMPORTED_PROVIDER for row in answers_of(tmp_path, "first")) == 20
        bought = process.stats()["generations"]
        assert bought == tally["samples"] - 20 + 60
        assert run_once(tmp_path, process.base_url).digest == manifest.digest
        reopen(recipe, run)
        whole = run_once(tmp_path, process.base_url)
        check_complete(tmp_path, whole)
        assert process.stats()["generations"] == 100
        assert Decimal(whole.stats["spent_usd"]) == Decimal(process.stats()["billed_usd"])


def test_chosen_failures_are_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_TEST_KEY", KEY)
    filtered = {**CALM, "faults": [{"kind": "content_filter", "share": 0.2}]}
    build(tmp_path, 40, filtered, max_failed_share=1.0)
    with server(tmp_path) as process:
        manifest = run_once(tmp_path, process.base_url)
        failed = manifest.stats["failed"]
        assert failed > 0
        run, recipe = RunDirectory(tmp_path / "run"), recipe_of(tmp_path, process.base_url)
        assert not reopen(recipe, run, [FailureClass.EMPTY])
        assert reopen(recipe, run, [FailureClass.REJECTED]) == {FailureClass.REJECTED: failed}
        again = run_once(tmp_path, process.base_url)
        assert again.stats["failed"] <= failed
        assert again.stats["samples"] + again.stats["failed"] == 80


def test_money_in_doubt_at_sealing_is_settled_by_the_next_call(tmp_path, monkeypatch):
    """A request of which only the generation's name arrived: the service keeps books, and is asked for them."""
    monkeypatch.setenv("EAGLE3_TEST_KEY", KEY)
    build(tmp_path, 20, CALM)
    with server(tmp_path) as process:
        run_once(tmp_path, process.base_url)
        message = {"role": "user", "content": "first prompt 0"}
        lost = httpx.post(
            f"{process.base_url}/chat/completions",
            json={"model": MODEL, "messages": [message], "max_tokens": 64},
            headers={"authorization": f"Bearer {KEY}"},
            timeout=30,
        ).json()
        wait_until_listed(process.base_url, lost["id"])
        run, recipe = RunDirectory(tmp_path / "run"), recipe_of(tmp_path, process.base_url)
        stage = open_completions(recipe, run)
        assert stage.manifest is not None
        sample_id = answers_of(tmp_path, "first")[0]["sample_id"]
        asked = {"id": sample_id, "attempt": 99, "sha256": "s", "routing": "r"}
        intent = {"kind": "intent", **asked, "reserved_usd": "0.5", "time": time.time()}
        named = {"kind": "accepted", "requests": [[sample_id, 99, lost["id"]]]}
        lines = [*encode_line(intent), *encode_line(named)]
        (stage.path / "first" / "journal-9999.jsonl").write_bytes(b"".join(lines))
        totals = dict.fromkeys(DATASETS, 20)
        in_doubt = book_figures(*replay(stage.path, totals, recipe.generation.budget_usd), totals)
        assert Decimal(in_doubt["held_usd"]) == Decimal("0.5")
        sealed = stage.seal(stage.manifest.shards, {**stage.manifest.stats, **in_doubt})

        settled = run_once(tmp_path, process.base_url)
        assert settled.digest == sealed.digest
        assert Decimal(settled.stats["held_usd"]) == 0
        assert Decimal(settled.stats["spent_usd"]) == Decimal(process.stats()["billed_usd"])
        assert Decimal(settled.stats["spent_usd"]) > Decimal(sealed.stats["spent_usd"])
