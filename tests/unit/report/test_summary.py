import json
from decimal import Decimal

import pytest
from rich.console import Console

from eagle3.artifacts import Stage
from eagle3.report import build_summary, read_summary, render_summary, write_summary
from eagle3.report.rendering import usd

KEYS = {
    "run", "recipe", "target", "complete", "samples", "failed", "dropped_prompts", "tokens", "prompt_tokens",
    "completion_tokens", "exactness", "audit_verdict", "audit", "planned_usd", "budget_usd", "spent_usd", "held_usd",
    "corpus", "corpus_digest", "training_loss", "acceptance_length", "acceptance_length_untrained",
    "acceptance_length_trained", "acceptance_by_position", "providers", "stages", "paths",
}  # fmt: skip


@pytest.mark.parametrize("until", ["nothing", "prompts", "half of completions", "paused", "failed audit", "export"])
def test_every_run_has_every_key(make_run, until):
    assert set(build_summary(make_run(until))) == KEYS


def test_figures_of_a_complete_run(make_run):
    run = make_run()
    summary = write_summary(run)
    assert json.loads(run.summary_path.read_text(encoding="utf-8")) == summary
    assert summary["complete"] is True
    assert (summary["samples"], summary["failed"], summary["dropped_prompts"]) == (40, 2, 2)
    assert summary["tokens"] == summary["prompt_tokens"] + summary["completion_tokens"] > 0
    assert summary["exactness"] == {"count_verified": 38, "count_repaired": 2}
    assert summary["audit_verdict"] == "passed"
    assert summary["audit"] == {"kept": 39, "dropped": 1}
    assert summary["planned_usd"] == {"expected": "0.0150", "worst": "0.0900"}
    assert summary["spent_usd"] == "0.0164"
    assert summary["acceptance_length"] == {"untrained": 1.0, "trained": 1.62}
    assert summary["acceptance_length_trained"] == 1.62
    assert summary["acceptance_length_untrained"] == 1.0
    assert summary["acceptance_by_position"] == [0.41, 0.15, 0.06]
    assert summary["training_loss"] == 2.125
    assert summary["corpus_digest"] == run.sealed(Stage.CORPUS).stats["corpus_digest"]


def test_provider_shares_add_up(make_run):
    providers = build_summary(make_run())["providers"]
    assert providers["Alpha"]["sample_share"] == 0.75
    assert providers["Alpha"]["cost_share"] == 0.75
    assert sum(Decimal(entry["cost_usd"]) for entry in providers.values()) == Decimal("0.0164")


def test_pauses_between_processes_are_not_work(make_run):
    stages = build_summary(make_run())["stages"]
    assert stages["2-completions"]["wall_s"] == 60.5
    assert stages["7-draft"]["wall_s"] == 149.5
    assert stages["5-corpus"]["wall_s"] == 1.5
    assert stages["1-prompts"]["wall_s"] is None


def test_what_is_not_known_is_null(make_run):
    summary = build_summary(make_run("half of completions"))
    assert summary["samples"] == 20
    for key in (
        "spent_usd",
        "corpus_digest",
        "training_loss",
        "acceptance_length_trained",
        "audit_verdict",
        "exactness",
    ):
        assert summary[key] is None, key
    assert summary["budget_usd"] == "0.50"
    assert summary["complete"] is False


def test_a_summary_is_read_back_or_built_anew(make_run):
    run = make_run()
    assert read_summary(run) == build_summary(run)
    run.summary_path.write_text('{"samples": 7}', encoding="utf-8")
    assert read_summary(run) == {"samples": 7}
    run.summary_path.write_text("{", encoding="utf-8")
    assert read_summary(run) == build_summary(run)


def test_paths_are_relative_and_there(make_run):
    run = make_run()
    paths = write_summary(run)["paths"]
    assert "draft" in paths
    assert all(not path.startswith("/") for path in paths.values())
    assert all((run.path / path).exists() for path in paths.values() if path != "report.html")


def test_the_summary_prints_with_what_looks_like_markup(make_run):
    console = Console(width=160, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(render_summary({**build_summary(make_run()), "audit_verdict": "[/bold] passed"}))
    text = console.export_text()
    assert "1.620 trained, 1.000 untrained" in text
    assert "[/bold] passed" in text
    assert "spent $0.0164, planned $0.015 (at worst $0.09), budget $0.50" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [("0.5", "$0.50"), ("0", "$0.00"), ("0.000123", "$0.000123"), ("1234.5", "$1,234.50"), (None, "-"), ("x", "-")],
)
def test_dollars_for_people(value, text):
    assert usd(value) == text
