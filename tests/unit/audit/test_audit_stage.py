"""The driver and its report: what is dropped, what stops the run, what is sealed, what a second call does."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from eagle3.artifacts import Stage, read_manifest
from eagle3.audit import audit
from eagle3.audit.page import RULES, render_page
from eagle3.audit.provider_rules import PROVIDER_RULES
from eagle3.audit.sample_rules import SAMPLE_RULES
from eagle3.audit.verdict import MAX_LISTED, judge
from eagle3.errors import AuditFailedError, CorruptShardError, StageDriftError, StageMissingError
from eagle3.recipe import Audit
from eagle3.records import AuditFinding, Severity


def fill(run, replies, profile_of, **changes):
    """Seal prompts, completions and token samples; `replies` maps a prompt text to changes of its reply."""
    prompts = [run.prompt(text) for text in replies]
    completions = [run.completion(prompt, **changes) for prompt, changes in zip(prompts, replies.values(), strict=True)]
    samples = [run.sample(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
    run.seal_prompts(prompts)
    run.seal_completions(completions)
    run.seal_samples(samples, [profile_of("Acme", "thinking")])
    return samples


def test_drops_single_samples_and_seals(tiny_run, profile_of):
    replies = {f"question {number}": {} for number in range(10)}
    replies["question 3"] = {"delta": 1}
    replies["question 7"] = {"content": "bad \ufffd"}
    samples = fill(tiny_run, replies, profile_of)
    manifest = audit(tiny_run.recipe, tiny_run.run, tiny_run.target)
    assert manifest.stats["verdict"] == "passed"
    assert (manifest.stats["kept"], manifest.stats["dropped"]) == (8, 2)
    report = json.loads((tiny_run.run.stage_path(Stage.AUDIT) / "report.json").read_bytes())
    assert report["dropped"] == {samples[3].sample_id: "A05", samples[7].sample_id: "A10"}
    assert report["delta_by_provider"] == {"Acme": {"0": 9, "1": 1}}
    assert report["counts"]["A05"] == {"error": 1}
    assert report["counts_by_provider"]["Acme"] == {"A05": 1, "A10": 1}
    assert [shard.path for shard in manifest.shards] == ["report.json", "report.html"]


def test_second_call_reuses_and_other_settings_are_refused(tiny_run, profile_of):
    fill(tiny_run, {"question": {}}, profile_of)
    first = audit(tiny_run.recipe, tiny_run.run, tiny_run.target)
    again = audit(tiny_run.recipe, tiny_run.run, tiny_run.target)
    assert (again.digest, again.created_at) == (first.digest, first.created_at)
    changed = tiny_run.with_recipe(audit=Audit(max_drift_share=0.3))
    with pytest.raises(StageDriftError, match="max_drift_share"):
        audit(changed.recipe, changed.run, changed.target)


def test_critical_findings_write_the_report_and_seal_nothing(tiny_run, profile_of):
    fill(tiny_run, {f"question {number}": {"delta": 1} for number in range(5)}, profile_of)
    with pytest.raises(AuditFailedError) as caught:
        audit(tiny_run.recipe, tiny_run.run, tiny_run.target)
    message = str(caught.value)
    assert "A06, Acme: 5 of 5 answers have +1 ids" in message
    assert "4-audit/report.html" in message
    assert str(tiny_run.run.path) not in message
    folder = tiny_run.run.stage_path(Stage.AUDIT)
    assert json.loads((folder / "report.json").read_bytes())["verdict"] == "failed"
    assert "A06" in (folder / "report.html").read_text()
    assert read_manifest(folder) is None

    lenient = tiny_run.with_recipe(audit=Audit(stop_on_critical=False))
    manifest = audit(lenient.recipe, lenient.run, lenient.target)
    assert (manifest.stats["verdict"], manifest.stats["kept"]) == ("failed", 0)


def test_stages_that_do_not_belong_together_are_refused(tiny_run, profile_of):
    with pytest.raises(StageMissingError, match="1-prompts"):
        audit(tiny_run.recipe, tiny_run.run, tiny_run.target)
    prompts = [tiny_run.prompt("one"), tiny_run.prompt("two")]
    completions = [tiny_run.completion(prompt) for prompt in prompts]
    tiny_run.seal_prompts(prompts)
    tiny_run.seal_completions(completions[:1])
    tiny_run.seal_samples([tiny_run.sample(*pair) for pair in zip(prompts, completions, strict=True)])
    with pytest.raises(CorruptShardError, match="not in the shard of that name in '2-completions'"):
        audit(tiny_run.recipe, tiny_run.run, tiny_run.target)


def test_a_changed_shard_is_refused(tiny_run, profile_of):
    fill(tiny_run, {"question": {}}, profile_of)
    path = tiny_run.run.stage_path(Stage.TOKEN_SAMPLES) / "one" / "shard-00000.parquet"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CorruptShardError, match="changed after it was sealed"):
        audit(tiny_run.recipe, tiny_run.run, tiny_run.target)


def finding(rule: str, severity: Severity, sample_id: str | None = "s", **values) -> AuditFinding:
    return AuditFinding(rule=rule, severity=severity, sample_id=sample_id, detail="detail", provider="Acme", **values)


def test_the_worst_finding_names_the_drop_and_warnings_drop_nothing():
    report = judge(
        [
            finding("A08", Severity.ERROR),
            finding("A04", Severity.CRITICAL),
            finding("A13", Severity.WARNING, "kept"),
            finding("A19", Severity.CRITICAL, None),
        ],
        [],
    )
    assert report.dropped == {"s": "A04"}
    assert report.verdict == "failed"
    assert judge([finding("A08", Severity.ERROR)], []).verdict == "passed"


def test_long_lists_are_cut_and_counts_are_not():
    many = [finding("A13", Severity.WARNING, f"s{number:04d}") for number in range(MAX_LISTED + 50)]
    report = judge(many, [])
    assert len(report.findings) == MAX_LISTED
    assert report.counts == {"A13": {"warning": MAX_LISTED + 50}}


def test_the_page_is_one_well_formed_file_that_escapes_what_it_shows():
    report = replace(
        judge([finding("A04", Severity.CRITICAL, "<script>alert(1)</script>")], []),
        delta_by_provider={"<b>Acme</b>": {"-2": 3, "0": 40, "1": 1}},
    )
    page = render_page(report)
    assert "<script>" not in page
    assert "<b>Acme" not in page
    assert "http" not in page
    assert page.count("<rect") == 3
    checker = _Balanced()
    checker.feed(page)
    assert checker.open == []


def test_every_rule_is_explained_on_the_page():
    assert set(RULES) == {*SAMPLE_RULES, *PROVIDER_RULES, "A19"}


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
