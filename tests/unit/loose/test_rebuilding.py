"""Files of replies to ids: every line a row, every provider a profile, every oddity a finding."""

import json

import pytest
import yaml
from rich.console import Console

from eagle3.errors import InputError, TokenError
from eagle3.formats import FILE_SAMPLES, read_rows
from eagle3.loose.families import GrammarChoice, read_grammar_map
from eagle3.loose.rebuilding import reconstruct_file
from eagle3.loose.showing import render_report

END, CLOSE = 256, 260


@pytest.fixture
def rebuild(tmp_path, choice, write):
    def run(*lines, by=choice, **options):
        out, report = tmp_path / "made" / "out.parquet", tmp_path / "made" / "report.json"
        made = reconstruct_file(write(*lines), out, choice=by, report=report, **options)
        assert json.loads(report.read_text(encoding="utf-8")) == made
        return read_rows(out, FILE_SAMPLES), made

    return run


def rules(row):
    return [finding["rule"] for finding in row["findings"]]


def test_ids_of_a_line(rebuild, line):
    (row,), report = rebuild(line())
    prompt, completion = row["input_ids"][: row["num_prompt_tokens"]], row["input_ids"][row["num_prompt_tokens"] :]
    assert completion == [*b"Hm", CLOSE, *b"Hi", END]
    assert prompt[-1] == 259
    assert (row["line"], row["delta"], row["billed_completion_tokens"]) == (1, 0, 6)
    assert (row["grammar"], row["mode"]) == (report["providers"]["Acme"]["models"][0]["grammar"], "thinking")
    assert row["findings"] == []


def test_every_line_has_a_row_and_is_counted(rebuild, line):
    rows, report = rebuild(line(), b"{bad", b"", line(usage=None), line(finish_reason="strange"))
    assert [row["line"] for row in rows] == [1, 2, 4, 5]
    assert [row["exactness"] for row in rows][1:3] == ["mismatch", "unverified"]
    assert rows[1]["input_ids"] == []
    assert (report["lines"], report["samples"], report["bad_lines"]) == (4, 3, 1)
    assert report["findings"]["bad-line"] == 1
    assert report["providers"]["unknown"]["bad_lines"] == 1
    assert report["providers"]["unknown"]["profile"] is None


def test_an_anomaly_is_flagged_and_not_repaired(rebuild, line):
    odd = line(usage={"completion_tokens": 13})
    rows, report = rebuild(*[line()] * 30, odd)
    assert (rows[-1]["exactness"], rows[-1]["delta"]) == ("mismatch", -7)
    assert "A05" in rules(rows[-1])
    assert report["providers"]["Acme"]["delta"] == {"-7": 1, "0": 30}
    assert report["providers"]["Acme"]["profile"]["exact"] == 30


def test_providers_and_models_are_groups_of_their_own(rebuild, line):
    other = line(provider="Other", usage={"completion_tokens": 5})
    second = line(request={"model": "acme/second", "messages": []})
    rows, report = rebuild(*[line()] * 25, *[other] * 25, second)
    assert report["providers"]["Acme"]["profile"]["habits"]["end_billed"]
    assert report["providers"]["Other"]["samples"] == 25
    assert {row["delta"] for row in rows} == {0}
    assert [entry["model"] for entry in report["providers"]["Acme"]["models"]] == ["acme/tiny", "acme/second"]
    assert "no-request" in rules(rows[-1])


def test_compared_habits_are_shown(rebuild, line):
    spaced = line(content="Hi ", reasoning="Hm", provider="Spaced", usage={"completion_tokens": 6})
    _, report = rebuild(*[line()] * 25, *[spaced] * 25)
    assert report["providers"]["Spaced"]["profile"]["compared"] == ["tail_space"]
    console = Console(width=100, record=True)
    console.print(render_report(report))
    assert "tail_space strip_all (compared)" in console.export_text()


def test_grammar_by_model_map_and_default(rebuild, line, place, tmp_path):
    by_model = line(request={"model": "acme/other-7b", "messages": []})
    other = str(place / "other.yaml")
    mapped = GrammarChoice(tokenizer=place / "target", default=str(place / "tiny.yaml"), patterns={"*7b": other})
    rows, _ = rebuild(line(), by_model, by=mapped)
    assert [row["grammar"] for row in rows] == ["tiny", "other"]
    default = GrammarChoice(tokenizer=place / "target", default=other)
    assert default.name_for("acme/OTHER-7b", None) == other
    assert default.name_for("acme/else", None) == other
    assert default.name_for("moonshotai/Kimi-K2-Instruct-0905:groq", None) == "kimi-k2"
    assert default.name_for("moonshotai/kimi-k2.5", None) == "kimi-k2.5"
    assert default.name_for("alias", "moonshotai/kimi-k2.5-0127") == "kimi-k2.5"


def test_a_model_of_another_vocabulary_is_told(rebuild, line):
    rows, report = rebuild(line(), line(request={"model": "openai/gpt-oss-120b", "messages": []}))
    assert rules(rows[1]) == ["no-family"]
    assert (rows[1]["grammar"], rows[1]["exactness"]) == ("gpt-oss", "mismatch")
    assert report["bad_lines"] == 1


def test_a_model_that_was_not_asked_for_is_told(rebuild, line):
    reply = {
        "model": "openai/gpt-oss-20b",
        "choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 3},
    }
    rows, _ = rebuild({"request": {"model": "moonshotai/kimi-k2.5", "messages": []}, "response": reply})
    assert rows[0]["grammar"] == "gpt-oss"
    assert "other-model" in rules(rows[0])


def test_modes(rebuild, line):
    instant = line(reasoning=None, usage={"completion_tokens": 3})
    asked = line(
        request={"model": "m", "messages": [], "reasoning": {"enabled": False}},
        message={"content": "Hi"},
        usage={"completion_tokens": 3},
    )
    empty = line(reasoning=None)
    for lines, mode in (
        ([instant], "instant"),
        ([asked], "instant"),
        ([empty], "thinking"),
        ([line(), empty], "thinking"),
    ):
        rows, _ = rebuild(*lines)
        assert {row["mode"] for row in rows} == {mode}
        assert {row["delta"] for row in rows} == {0}
    rows, _ = rebuild(instant, mode="thinking")
    assert rows[0]["mode"] == "thinking"


def test_prompts_that_cannot_be_rendered_are_told(rebuild, line):
    rows, _ = rebuild(line(request={"model": "acme/tiny", "messages": [{"role": "forbidden", "content": "x"}]}))
    assert rules(rows[0]) == ["prompt-not-rendered"]
    assert rows[0]["num_prompt_tokens"] == 0
    assert rows[0]["delta"] == 0


def test_replies_without_a_place_are_told(rebuild, line):
    rows, _ = rebuild(line(), mode="instant")
    assert rows[0]["exactness"] == "mismatch"
    assert {"not-rebuilt", "A05"} <= set(rules(rows[0]))


def test_errors(tmp_path, choice, place, line, write):
    with pytest.raises(InputError, match="cannot be read"):
        reconstruct_file(tmp_path / "missing", tmp_path / "out", choice=choice)
    with pytest.raises(InputError, match="cannot be written"):
        reconstruct_file(write(line()), tmp_path / "in.jsonl" / "out", choice=choice)
    with pytest.raises(TokenError, match="no response grammar"):
        reconstruct_file(write(line()), tmp_path / "out", choice=GrammarChoice(tokenizer=place, default="nonsense"))


def test_grammar_maps(tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text(yaml.safe_dump({"*a*": "kimi-k2", "*b*": "mine.yaml"}))
    assert read_grammar_map(path) == {"*a*": "kimi-k2", "*b*": str(tmp_path / "mine.yaml")}
    for text in ("[]", "{}", "a: 1", "{", "x"):
        path.write_text(text)
        with pytest.raises(InputError, match="grammar map"):
            read_grammar_map(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_grammar_map(tmp_path / "missing")


def test_what_a_group_shows_as_a_whole_stands_in_the_report(rebuild, line):
    """A provider that bills one token more on every third answer: no single line can show that this is no drift."""
    lines = [line(usage={"completion_tokens": 6 + (number % 3 == 0)}) for number in range(60)]
    _, report = rebuild(*lines)
    entry = report["providers"]["Acme"]
    assert ("A05", "critical") in {(each["rule"], each["severity"]) for each in entry["group_findings"]}
    assert entry["group_findings"] == entry["models"][0]["group_findings"]


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [{"id": "f:0", "function": {"name": "f", "arguments": '{"a": ' + "[" * 100_000}}]},
        {"tool_calls": [{"id": "f:0", "function": {"name": "f", "arguments": '{"a": ' + "9" * 10_000 + "}"}}]},
        {"content": "x" * 500_000},
        {"content": "\x00\ufffd\u2028"},
    ],
    ids=["nested", "huge number", "long", "odd characters"],
)
def test_an_odd_answer_is_a_finding_and_the_file_goes_on(rebuild, line, message):
    odd = line()
    odd["message"] = {"content": None, "reasoning": "Hm", **message}
    rows, report = rebuild(odd, line())
    assert rows[0]["exactness"] == "mismatch"
    assert rules(rows[0])
    assert rows[1]["input_ids"][-1] == END
    assert report["lines"] == 2


def test_a_stream_of_odd_parts_does_not_stop_the_file(rebuild, line):
    event = {"choices": [{"delta": {"tool_calls": [{"index": "x", "function": {"arguments": 3}}]}, "token_ids": 3}]}
    stream = {"request": {}, "provider": "Acme", "raw_body": f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"}
    _, report = rebuild(stream, line())
    assert report["lines"] == 2
