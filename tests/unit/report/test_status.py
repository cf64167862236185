import json
import re
from pathlib import Path

import pytest

from eagle3.artifacts import RunDirectory, Stage
from eagle3.errors import InputError
from eagle3.progress import ProgressEvent
from eagle3.progress_log import ProgressLog
from eagle3.report import RunStatus, StageState, render_status, run_status


def states(status: RunStatus) -> dict[Stage, StageState]:
    return {row.stage: row.state for row in status.stages}


def row(status: RunStatus, stage: Stage):
    return next(entry for entry in status.stages if entry.stage is stage)


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(InputError, match="'gone' does not exist"):
        run_status(RunDirectory(tmp_path / "gone"))


def test_an_empty_directory_has_started_nothing(make_run):
    status = run_status(make_run("nothing"))
    assert set(states(status).values()) == {StageState.NOT_STARTED}
    assert not status.is_complete
    assert status.unfinished == []
    assert status.next_command == "eagle3 prompts"
    assert "spent -" in render_status(status).plain


def test_committed_shards_without_a_manifest_are_partial(make_run):
    status = run_status(make_run("half of completions"))
    found = row(status, Stage.COMPLETIONS)
    assert (found.state, found.shards_done, found.shards_expected, found.samples) == (StageState.PARTIAL, 1, 2, 20)
    assert status.unfinished == ["2-completions: 1 of 2 shards are done. Run it again to go on."]
    assert [(entry.dataset, entry.prompts, entry.answered) for entry in status.datasets] == [
        ("code", 21, 20),
        ("chat", 21, 0),
    ]
    assert status.journal_bytes == 6
    assert status.next_command == "eagle3 generate"


def test_shards_of_other_settings_do_not_count_as_progress(make_run):
    run = make_run("half of completions")
    other = run.open_stage(Stage.COMPLETIONS, {"stage": "other"}, {})
    other.commit_shard("chat/shard-00000.parquet", lambda path: path.write_bytes(b"x"), num_samples=7)
    found = row(run_status(run), Stage.COMPLETIONS)
    assert found.shards_done == 1
    assert "1 more files are from other settings" in found.reason


def test_a_shard_whose_file_is_gone_is_not_done(make_run):
    run = make_run("half of completions")
    (run.stage_path(Stage.COMPLETIONS) / "code" / "shard-00000.parquet").unlink()
    found = row(run_status(run), Stage.COMPLETIONS)
    assert found.shards_done == 0
    assert "journal holds 6 bytes" in found.reason


def test_spend_of_an_unsealed_generation_comes_from_the_log_and_says_so(make_run):
    run = make_run("half of completions")
    with ProgressLog(run.path / "progress.jsonl", clock=lambda: 5.0) as log:
        values = {"spent_usd": "0.0100", "held_usd": 0.25}
        log(ProgressEvent(stage="generation", done=3, total=9, values=values))
        log(ProgressEvent(stage="generation", label="code", done=1, total=3, values={"spent_usd": 0.002}))
    status = run_status(run)
    assert (status.spend.spent_usd, status.spend.held_usd, status.spend.source) == ("0.0100", "0.25", "progress log")
    assert "as last reported" in render_status(status).plain
    assert status.last_progress is not None
    assert status.last_progress.label == "code"


def test_a_paused_stage_says_so_and_keeps_its_figures(make_run):
    status = run_status(make_run("paused"))
    found = row(status, Stage.COMPLETIONS)
    assert (found.state, found.shards_done, found.shards_expected) == (StageState.PAUSED, 1, 2)
    assert "paused after 40 samples" in found.reason
    assert (status.spend.spent_usd, status.spend.source) == ("0.0164", "manifest")
    assert re.search(r"2-completions\s+paused\s+1 of 2 shards", render_status(status).plain)


def test_an_attempt_that_paused_says_why(make_run):
    status = run_status(make_run("no credits"))
    found = row(status, Stage.COMPLETIONS)
    assert found.state is StageState.PAUSED
    assert found.reason == "the account cannot pay. Top it up and run again."
    assert states(status)[Stage.TOKEN_SAMPLES] is StageState.NOT_STARTED


def test_a_refused_draft_is_failed(make_run):
    run = make_run()
    folder = run.stage_path(Stage.EVALUATION)
    (folder / "manifest.json").unlink()
    (folder / "report.json").write_text('{"acceptance_length_trained": 1.01}', encoding="utf-8")
    found = row(run_status(run), Stage.EVALUATION)
    assert found.state is StageState.FAILED
    assert "acceptance length 1.01" in found.reason


def test_a_failed_audit_names_its_rules(make_run):
    status = run_status(make_run("failed audit"))
    found = row(status, Stage.AUDIT)
    assert found.state is StageState.FAILED
    assert "systematic_mismatch (3)" in found.reason


def test_a_complete_run(make_run):
    status = run_status(make_run())
    assert set(states(status).values()) == {StageState.COMPLETE}
    assert status.is_complete
    assert status.next_command is None
    assert status.failures == {"rejected": 1, "retries_exhausted": 1, "prompt: special_literal": 2}
    text = render_status(status).plain
    assert text.endswith("  complete")
    assert "spent $0.0164 of $0.50 budget, held $0.0002 (the bill is at most $0.0166; 'eagle3 generate' " in text
    assert "compares it with the account), planned $0.015 (at worst $0.09)" in text


def test_a_stage_made_from_inputs_that_changed_is_drifted(make_run):
    run = make_run()
    manifest = run.stage_path(Stage.AUDIT) / "manifest.json"
    stored = json.loads(manifest.read_text(encoding="utf-8"))
    stored["fingerprint"] = "0" * 64
    manifest.write_text(json.dumps(stored), encoding="utf-8")
    status = run_status(run)
    assert states(status)[Stage.CORPUS] is StageState.DRIFTED
    assert "made from '4-audit' with digest" in row(status, Stage.CORPUS).reason
    assert not status.is_complete


def test_a_stage_whose_input_is_gone_is_drifted(make_run):
    run = make_run()
    (run.stage_path(Stage.AUDIT) / "manifest.json").unlink()
    assert states(run_status(run))[Stage.CORPUS] is StageState.DRIFTED


@pytest.mark.parametrize("content", ["{", "[]", '{"stage": "2-completions"}', ""])
def test_a_damaged_manifest_is_told_in_words(make_run, content):
    run = make_run()
    (run.stage_path(Stage.COMPLETIONS) / "manifest.json").write_text(content, encoding="utf-8")
    status = run_status(run)
    found = row(status, Stage.COMPLETIONS)
    assert found.state is StageState.UNREADABLE
    assert "Delete the folder" in found.reason or "Restore" in found.reason
    assert "! 2-completions: manifest of stage" in render_status(status).plain


def test_damaged_side_files_are_ignored(make_run):
    run = make_run("half of completions")
    (run.path / "recipe.resolved.json").write_text("{", encoding="utf-8")
    (run.path / "recipe.yaml").write_text("a: [", encoding="utf-8")
    (run.path / "progress.jsonl").write_text("[1]\n{}\n{", encoding="utf-8")
    (run.stage_path(Stage.COMPLETIONS) / "failed.jsonl").write_text('{"failure": "rejected"}\n{"fail', encoding="utf-8")
    status = run_status(run)
    assert status.recipe is None
    assert status.failures["rejected"] == 1


def test_status_as_json_is_plain_and_whole(make_run):
    status = run_status(make_run("half of completions"))
    value = json.loads(json.dumps(status.to_json()))
    assert value["stages"][1]["state"] == "partial"
    assert value["unfinished"] == list(status.unfinished)
    assert value["next_command"] == "eagle3 generate"
    assert value["spend"]["budget_usd"] == "0.50"


def test_status_writes_nothing(make_run):
    run = make_run("half of completions")

    def listing() -> list[tuple[Path, int]]:
        return sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))

    before = listing()
    run_status(run)
    assert listing() == before
