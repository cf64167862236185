import re
from html.parser import HTMLParser

import pytest

from eagle3.artifacts import Stage
from eagle3.report import build_report, write_report
from eagle3.report.markup import without_secrets

SECTIONS = ["headline", "road", "spend", "lengths", "providers", "exactness", "left-out", "gates", "training",
            "acceptance", "provenance"]  # fmt: skip
VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Collects tags, attributes and the text of each section, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self._section = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data):
        if self._section:
            self.text[self._section] = self.text.get(self._section, "") + " " + data


def read(document: str) -> Reader:
    reader = Reader()
    reader.feed(document)
    reader.close()
    assert reader._open == []
    return reader


ENDINGS = ["nothing", "prompts", "half of completions", "paused", "failed audit", "export"]


@pytest.mark.parametrize("until", ENDINGS)
def test_every_run_has_every_section_and_refers_to_nothing_outside(make_run, until):
    document = build_report(make_run(until))
    reader = read(document)
    assert list(reader.text) == SECTIONS
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not {"src", "href", "xlink:href", "action", "onload"} & {name for name, _ in reader.attributes}
    assert not re.search(r"https?://|url\(|@import", document)


def test_sections_that_have_nothing_yet_say_so(make_run):
    text = read(build_report(make_run("half of completions"))).text
    for name in ("spend", "lengths", "providers", "exactness", "gates", "training", "acceptance"):
        assert "not yet" in text[name], name
    assert "1 of 2 shards are done" in text["road"]


def test_figures_are_those_of_the_run(make_run):
    text = read(build_report(make_run())).text
    assert all("not yet" not in part for part in text.values())
    assert "$0.0164" in text["headline"]
    assert "1.62" in text["headline"]
    assert "untrained 1.00" in text["headline"]
    assert "count_verified 38 95.0%" in " ".join(text["exactness"].split())
    assert "Alpha, 0: 28 (93.3%)" in text["exactness"]
    beside = " ".join(text["exactness"].split())
    assert "identical 30 75.0%" in beside
    assert "drifted and flagged 8 20.0%" in beside
    assert "drifted unseen same length 2 5.0%" in beside
    assert "Alpha 30 75.0% 2,200 $0.0123 75.0%" in " ".join(text["providers"].split())
    assert "trained, token 1: 0.41" in text["acceptance"]
    assert "untrained, token 1: 0.001" in text["acceptance"]
    assert "passed yes, share 0.93" in text["gates"]
    left_out = " ".join(text["left-out"].split())
    for line in (
        "prompt not asked special_literal 2",
        "no answer rejected 1",
        "dropped by the audit truncated 1",
        "left out of the corpus too_long 1",
    ):
        assert line in left_out


def test_the_histogram_counts_every_sample(make_run):
    text = read(build_report(make_run())).text["lengths"]
    counts = [int(count) for count in re.findall(r"to \S+: (\d+)", text)]
    assert sum(counts) == 2 * 40


def test_the_spend_curve_ends_at_what_was_spent(make_run):
    text = read(build_report(make_run())).text["spend"]
    assert "spent: 0.0164 at 60" in text
    assert "in flight: 500 at 30" in text
    assert "spent: 0.001822" not in text, "one dataset's spend is not the run's"


def test_the_loss_curve_is_the_sealed_one_or_what_progress_tells(make_run):
    run = make_run()
    sealed = read(build_report(run)).text["training"]
    assert "validation: 3 at 300" in sealed
    assert "loss_curve" not in sealed
    (run.stage_path(Stage.DRAFT) / "manifest.json").unlink()
    running = read(build_report(run)).text["training"]
    assert "training: 10.96 at 1 " in running
    assert "validation:" not in running


def test_data_cannot_become_markup(make_run):
    document = build_report(make_run())
    assert "<script" not in document.lower()
    assert "&lt;script&gt;alert(" in document


def test_keys_paths_and_hosts_stay_on_the_machine(make_run, tmp_path):
    document = build_report(make_run())
    assert "sk-or-v1-0123456789abcdef0123" not in document
    assert "/srv/models" not in document
    assert "secret-host" not in document
    assert str(tmp_path) not in document
    assert "…/model.safetensors" in document


def test_a_changed_file_is_named_and_the_rest_is_plotted(make_run):
    run = make_run()
    (run.stage_path(Stage.TOKEN_SAMPLES) / "code" / "shard-00000.parquet").write_bytes(b"changed")
    text = read(build_report(run)).text["lengths"]
    assert "it changed after it was sealed" in text
    assert sum(int(count) for count in re.findall(r"to \S+: (\d+)", text)) == 2 * 20


def test_a_damaged_manifest_shows_in_the_road(make_run):
    run = make_run()
    (run.stage_path(Stage.TOKEN_SAMPLES) / "manifest.json").write_text("{", encoding="utf-8")
    assert "cannot be read" in read(build_report(run)).text["road"]


def test_the_report_lies_in_the_run_directory(make_run):
    run = make_run()
    write_report(run)
    assert run.report_path.read_text(encoding="utf-8") == build_report(run)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("path: /home/me/models/smol", "path: …/smol"),
        ("path: ~/models/smol", "path: …/smol"),
        ("Authorization: Bearer abcdefghijkl", "Authorization: [removed]"),
        ("sk-or-v1-abcdef0123456789", "[removed]"),
        ("answers: ../../examples/a.jsonl", "answers: ../../examples/a.jsonl"),
        ("model: moonshotai/kimi-k2.5", "model: moonshotai/kimi-k2.5"),
        ("2 / 3 and n // 2", "2 / 3 and n // 2"),
    ],
)
def test_what_is_removed_from_text(text, kept):
    assert without_secrets(text) == kept
