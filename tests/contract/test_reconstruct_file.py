"""`eagle3 reconstruct-file` on recorded replies of real providers, and on faults planted into a real vocabulary."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from eagle3.cli import app
from eagle3.errors import TemplateError
from eagle3.formats import FILE_SAMPLES, read_rows
from eagle3.loose.families import GrammarChoice
from eagle3.loose.reading import parse_line, read_loose_replies
from eagle3.loose.rebuilding import rebuild_replies
from eagle3.tokens.grammar import load_grammar
from eagle3.tokens.layout import Habits, Shape, lay_out
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.tokenizer import load_tokenizer

MODEL = "moonshotai/kimi-k2.5"
ANOMALY = 1
"""Line of the one recorded reply whose billed count nothing explains."""


@pytest.fixture(scope="module")
def command(shared_data, tmp_path_factory):
    place = tmp_path_factory.mktemp("file")

    def run(name, *options):
        out, report = place / f"{name}.parquet", place / f"{name}.json"
        done = CliRunner().invoke(
            app,
            [
                "reconstruct-file",
                "--tokenizer",
                str(shared_data / "kimi-k2.5"),
                "--grammar",
                "kimi-k2.5",
                str(shared_data / "recordings" / f"{name}.jsonl"),
                str(out),
                "--report",
                str(report),
                *options,
            ],
        )
        assert done.exit_code == 0, done.output
        return read_rows(out, FILE_SAMPLES), json.loads(report.read_text("utf-8")), done.stdout

    return run


@pytest.fixture(scope="module")
def parsed(command):
    return command("kimi_responses")


def test_every_reply_bills_what_was_rebuilt_but_the_anomaly(parsed):
    rows, report, printed = parsed
    assert len(rows) == report["samples"] == 18
    assert report["bad_lines"] == 0
    for row in rows:
        count = len(row["input_ids"]) - row["num_prompt_tokens"]
        unbilled_end = row["provider"] == "avian-kimi"
        if row["line"] == ANOMALY:
            assert (row["exactness"], row["delta"]) == ("mismatch", 7)
            assert "A05" in {finding["rule"] for finding in row["findings"]}
        else:
            assert row["delta"] == 0
            assert count - unbilled_end == row["billed_completion_tokens"]
    assert "args_style spaced" in printed
    assert "end_billed no" in printed


def test_each_line_has_the_grammar_of_its_model(parsed):
    rows, report, _ = parsed
    for row in rows:
        expected = "kimi-k2.5" if "kimi-k2.5" in row["model"] else "kimi-k2"
        assert row["grammar"] == expected
    assert set(report["providers"]) == {
        "Chutes",
        "Inceptron",
        "ModelRun",
        "avian-kimi",
        "groq-kimi-k2",
        "huggingface-kimi-k2",
    }
    for entry in report["providers"].values():
        assert {"samples", "profile", "delta", "findings"} <= set(entry)
        assert set(entry["profile"]["identified"]) == set(entry["profile"]["habits"])


def test_first_prompts_have_as_many_tokens_as_were_billed(parsed):
    rows, _, _ = parsed
    plain = [(row["num_prompt_tokens"], row["billed_prompt_tokens"]) for row in rows if row["num_prompt_tokens"] <= 21]
    assert sorted(plain) == [(20, 20), (20, 20), (21, 21), (21, 21), (21, 21)]


def test_raw_bodies_give_the_ids_of_the_parsed_replies(command, parsed, shared_data):
    raw, report, _ = command("openrouter_raw_k25")
    assert report["bad_lines"] == 0
    requests = [json.loads(line)["request"] for line in _lines(shared_data / "recordings/kimi_responses.jsonl")]
    for row, line in zip(raw, _lines(shared_data / "recordings/openrouter_raw_k25.jsonl"), strict=True):
        twin = parsed[0][requests.index(json.loads(line)["request"])]
        assert (row["input_ids"], row["delta"], row["provider"]) == (twin["input_ids"], 0, twin["provider"])


def _lines(path):
    return [line for line in path.read_text("utf-8").split("\n") if line]


def test_mistakes_of_the_caller_exit_with_2(shared_data, tmp_path):
    tokenizer, source = str(shared_data / "kimi-k2.5"), str(shared_data / "recordings/kimi_responses.jsonl")
    for arguments, message in (
        (["--tokenizer", tokenizer, "--grammar", "kimi-k2.5", "missing.jsonl"], "cannot be read"),
        (["--tokenizer", tokenizer, "--grammar", "nonsense", source], "no response grammar"),
        (["--tokenizer", str(tmp_path), "--grammar", "kimi-k2.5", source], "cannot be read"),
        (["--tokenizer", tokenizer, "--grammar", "kimi-k2.5", "--mode", "x", source], "no mode"),
        (["--tokenizer", tokenizer, "--grammar", "kimi-k2.5", "--grammar-map", "none.yaml", source], "grammar map"),
    ):
        done = CliRunner().invoke(app, ["reconstruct-file", *arguments, str(tmp_path / "out.parquet")])
        assert done.exit_code == 2, done.output
        assert message in " ".join(done.output.split())


@pytest.fixture(scope="module")
def choice(shared_data):
    return GrammarChoice(tokenizer=shared_data / "kimi-k2.5", default="kimi-k2.5")


def _line(encode, reasoning, content, **changes):
    """A line of a faithful provider whose ids are known: reasoning, close, content, end."""
    ids = [*encode(reasoning), 163607, *encode(content), 163586]
    line = {
        "request": {"model": MODEL, "messages": [{"role": "user", "content": "Q"}]},
        "message": {"reasoning": reasoning, "content": content},
        "usage": {"completion_tokens": len(ids)},
        "finish_reason": "stop",
        "provider": "Acme",
    }
    return {**line, **changes}, ids


@pytest.mark.parametrize("is_streamed", [False, True])
def test_texts_come_through_a_file_byte_by_byte(choice, tmp_path, is_streamed):
    """Nothing between the line and the ids strips, normalises or splits: not the reader, not JSON, not the stream."""
    encode = choice.default_family().tokenizer.encode_ordinary
    contents = [
        "👩\u200d👩\u200d👧 🇮🇹 👍🏽 e\u0301",
        "one\r\ntwo\rthree\n\n\n",
        "\ufeffBOM, nb\u00a0sp, line\u2028sep, next\u0085line, wide\u3000space",
        "  two spaces before, a tab after\t",
        "a\x00b\x1cc\x0b",
        "1\u3007\u3007\u3007 中文abc don't DON'T",
        "<|im_end|> [EOS] <|im_<|im_end|>end|> <|reserved_token_163700|>",
        "42",
    ]
    lines, truth = zip(*[_line(encode, f"Hm {content}", content) for content in contents], strict=True)
    path = tmp_path / "odd.jsonl"
    made = [_streamed(line) if is_streamed else line for line in lines]
    path.write_bytes(b"\n".join(json.dumps(line, ensure_ascii=False).encode() for line in made) + b"\n")
    result = rebuild_replies(read_loose_replies(path), choice, min_samples=20)
    found = [row["input_ids"][row["num_prompt_tokens"] :] for row in result.rows]
    assert found == list(truth)
    assert {row["delta"] for row in result.rows} == {0}


def _streamed(line):
    events = []
    for key in ("reasoning", "content"):
        events += [{"choices": [{"delta": {key: character}}]} for character in line["message"][key]]
    events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": line["usage"]}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return {"request": line["request"], "provider": line["provider"], "raw_body": body}


def test_what_parsers_drop_is_seen_by_the_count(choice):
    """Text after a tool section, a stop string, ids of calls that the server invents: never taken as exact."""
    encode = choice.default_family().tokenizer.encode_ordinary
    good = [_line(encode, f"Thought {number}.", f"Answer {number}.")[0] for number in range(30)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "functions.f:0", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Q"}], "tools": [tool]}
    num_ids = [*encode("Hm"), 0, 0, 0, *encode(call["id"]), 0, *encode('{"a": 1}'), 0, 0, 0]
    message = {"reasoning": "Hm", "content": None, "tool_calls": [call]}
    whole = {**good[0], "request": asked, "message": message, "finish_reason": "tool_calls"}
    whole["usage"] = {"completion_tokens": len(num_ids)}
    dropped = {**whole, "usage": {"completion_tokens": len(num_ids) + len(encode("And more."))}}
    stopped, _ = _line(encode, "Hm", "Until")
    stopped["usage"] = {"completion_tokens": stopped["usage"]["completion_tokens"] - 1}
    invented = json.loads(json.dumps(whole))
    invented["message"]["tool_calls"][0]["id"] = "call_9f3a"
    lines = [*good, whole, dropped, stopped, invented]
    read = [parse_line(number, json.dumps(line).encode()) for number, line in enumerate(lines, start=1)]
    rows = rebuild_replies(read, choice, min_samples=20).rows[30:]
    flagged = [
        row["exactness"] == "mismatch" or any(finding["severity"] == "error" for finding in row["findings"])
        for row in rows
    ]
    assert flagged == [False, True, True, True]
    assert {finding["rule"] for finding in rows[3]["findings"]} >= {"A12"}


@pytest.fixture(scope="module")
def replies(choice, shared_data):
    """Lines of a faithful provider; every fourth is cut, every third calls a tool."""
    family = choice.default_family()
    texts = [json.loads(line) for line in _lines(shared_data / "prompts/gsm8k/test.jsonl")[:120]]
    made = []
    for number, text in enumerate(texts):
        finish = "length" if number % 4 == 0 else "tool_calls" if number % 3 == 0 else "stop"
        message = {"reasoning": text["question"], "content": text["answer"]}
        if finish == "tool_calls":
            arguments = '{"expression": "2 + 3", "digits": 4}'
            message["tool_calls"] = [{"id": f"functions.f:{number}", "function": {"name": "f", "arguments": arguments}}]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        line = {
            "request": {"model": MODEL, "messages": [{"role": "user", "content": "Q"}], "tools": [tool]},
            "message": message,
            "usage": {"completion_tokens": 1},
            "finish_reason": finish,
            "provider": "Acme",
        }
        clean = parse_line(1, json.dumps(line).encode()).completion
        encode = family.tokenizer.encode_ordinary
        pieces = lay_out(clean, family.grammar, "thinking", Habits(), Shape(), encode)
        line["usage"]["completion_tokens"] = sum(len(piece.ids) for piece in pieces)
        made.append(line)
    return made


@pytest.fixture
def run(choice, replies):
    def go(spoil, first=0):
        lines = json.loads(json.dumps(replies))
        for line in lines[first:]:
            spoil(line)
        read = [parse_line(number, json.dumps(line).encode()) for number, line in enumerate(lines, start=1)]
        return rebuild_replies(read, choice, min_samples=20)

    return go


class TestPlantedFaults:
    """Replies made from real questions and a real vocabulary, spoiled in one way each."""

    @staticmethod
    def spaced(line):
        message = line["message"]
        message["reasoning"] = f" {message['reasoning']} "
        message["content"] = f" {message['content']}" + (" " if "tool_calls" in message else "")

    @staticmethod
    def compact(line):
        for call in line["message"].get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))

    @staticmethod
    def unbilled_end(line):
        line["usage"]["completion_tokens"] -= line["finish_reason"] != "length"

    @pytest.mark.parametrize(
        ("fault", "habits"),
        [
            (lambda line: None, {}),
            ("spaced", {"head_space": "strip", "tail_space": "strip"}),
            ("compact", {"args_style": "spaced"}),
            ("unbilled_end", {"end_billed": False}),
        ],
    )
    def test_a_habit_is_named_by_the_profile(self, run, fault, habits):
        result = run(getattr(self, fault) if isinstance(fault, str) else fault)
        profile = result.report["providers"]["Acme"]["profile"]
        assert {axis: profile["habits"][axis] for axis in habits} == habits
        assert profile["exact"] == profile["samples"] == 120
        assert all(profile["identified"][axis] for axis in habits)
        assert {row["delta"] for row in result.rows} == {0}

    @pytest.mark.parametrize(
        ("fault", "habits"), [("compact", {"args_style": "spaced"}), ("spaced", {"head_space": "strip"})]
    )
    def test_text_habits_that_begin_in_mid_run_are_recovered(self, run, fault, habits):
        """Undoing the habit leaves the texts before the change as they are, so one profile explains both halves."""
        result = run(getattr(self, fault), first=70)
        assert {row["delta"] for row in result.rows} == {0}
        found = result.report["providers"]["Acme"]["profile"]["habits"]
        assert {axis: found[axis] for axis in habits} == habits

    def test_billing_that_changes_in_mid_run_shows_as_a_second_spike(self, run):
        result = run(self.unbilled_end, first=70)
        assert len(result.report["providers"]["Acme"]["delta"]) > 1
        wrong = [row for row in result.rows if row["exactness"] == "mismatch"]
        assert len(wrong) > 3
        assert min(row["line"] for row in wrong) > 70
        assert all("A05" in {finding["rule"] for finding in row["findings"]} for row in wrong)

    def test_a_model_that_changes_in_mid_run_is_a_group_of_its_own(self, run):
        def swap(line):
            line["request"]["model"] = "moonshotai/kimi-k2-instruct-0905"
            line["message"]["reasoning"] = None

        result = run(swap, first=70)
        models = result.report["providers"]["Acme"]["models"]
        assert [(entry["model"], entry["samples"]) for entry in models] == [
            (MODEL, 70),
            ("moonshotai/kimi-k2-instruct-0905", 50),
        ]

    def test_a_template_without_the_opener_of_thinking_is_refused(self, shared_data, tmp_path):
        directory = tmp_path / "kimi"
        directory.mkdir()
        for path in (shared_data / "kimi-k2.5").iterdir():
            shutil.copyfile(path, directory / path.name)
        template = directory / "chat_template.jinja"
        whole = template.read_text("utf-8")
        head, opener, tail = whole.rpartition("  <think>\n")
        assert opener
        template.write_text(head + tail, encoding="utf-8")
        grammar = load_grammar("kimi-k2.5")
        renderer = PromptRenderer(directory, grammar, load_tokenizer(directory, grammar), "thinking")
        with pytest.raises(TemplateError, match=r"expects .*<think>"):
            renderer.render_ids([{"role": "user", "content": "Hi"}])
