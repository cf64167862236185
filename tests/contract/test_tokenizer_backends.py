"""Real vocabularies, all backends: golden ids, an independent second backend, edge cases, planted faults."""

# ruff: noqa: RUF001 - look-alike characters are what is tested

import gzip
import json
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from eagle3.audit.sample_rules import audit_sample
from eagle3.audit.subject import Subject, TokenRules
from eagle3.errors import TokenizerError
from eagle3.loose.reading import parse_line
from eagle3.records import PromptRecord, Severity, ToolCall, Usage
from eagle3.tokens.grammar import ResponseGrammar, load_grammar
from eagle3.tokens.layout import Habits, Shape, lay_out
from eagle3.tokens.profiles import fit_profile
from eagle3.tokens.reconstruct import reconstruct
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.tokenizer import Tokenizer, load_tokenizer

FAMILIES = ("kimi-k2.5", "smollm", "qwen3", "deepseek-v4", "gpt-oss")
EDGE_CASES = [
    "",
    "👩‍👩‍👧 🇮🇹 👍🏽",
    "a split emoji 👩",
    "[PAD] [BOS] <|reserved_token_163700|>",
    "a\x00b\x1cc",
    "one\r\ntwo\rthree",
    "\ufeffBOM",
    "nb\u00a0sp, line\u2028sep, ideographic\u3000space",
    "  two leading spaces",
    "\ttab\n\n\n",
    "<think></think> and <|im_end|> and [EOS] and <｜end▁of▁sentence｜>",
    "<|im_<|im_end|>end|>",
    "don't DON'T it'ſ 1〇〇〇 中文abc",
    "\ufffd",
    " ",
]
GOLDEN_KIMI = {
    "": "",
    "Hello, world!": "19180 11 2695 0",
    "  spaces   and\ttabs  ": "220 14803 256 316 5604 5609 256",
    "12345678901234567890": "6694 12972 16242 16349 18439 22523 2788",
    "Hello 你好 こんにちは 한국어 مرحبا 🌍": (
        "19180 220 33845 220 16444 29194 6880 43566 8831 78560 54078 28763 61561 7570 4265 1063 17137 44755"
    ),
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family": (
        "64390 101 67963 64390 102 67963 64390 100 67963 64390 99 3545"
    ),
    'fn main() {\n    println!("Hello");\n}': "10964 2777 539 440 274 47647 28547 19180 1752 92",
    "don't": "88709",
    "</think>": "993 39964 29",
    "<|im_end|>": "27 91 348 11129 91 29",
}
SPLICED_KIMI = [
    (["<|im_user|>"], "hello", ["<|im_end|>"], "163587 22931 163586"),
    (["<|tool_call_begin|>"], '{"name":"f"}', ["<|tool_call_end|>"], "163597 8264 1152 7471 69 16934 163599"),
    (["<|reserved_token_163600|>"], "", [], "163600"),
]


@dataclass(frozen=True)
class Target:
    directory: Path
    grammar: ResponseGrammar
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def targets(shared_data, tmp_path_factory):
    unpacked = tmp_path_factory.mktemp("gpt-oss")
    packed = (shared_data / "tokenizers/gpt-oss/tokenizer.json.gz").read_bytes()
    (unpacked / "tokenizer.json").write_bytes(gzip.decompress(packed))
    places = {
        "kimi-k2.5": shared_data / "kimi-k2.5",
        "smollm": shared_data / "tokenizers/smollm2",
        "qwen3": shared_data / "tokenizers/qwen3",
        "deepseek-v4": shared_data / "tokenizers/deepseek-v4",
        "gpt-oss": unpacked,
    }
    loaded = {}
    for name, directory in places.items():
        grammar = load_grammar(name)
        loaded[name] = Target(directory, grammar, load_tokenizer(directory, grammar))
    return loaded


@pytest.fixture(params=FAMILIES)
def target(request, targets):
    return targets[request.param]


@pytest.fixture
def kimi(targets):
    return targets["kimi-k2.5"]


def ids(text):
    return [int(entry) for entry in text.split()]


@pytest.mark.parametrize("text", GOLDEN_KIMI)
def test_golden_vectors(kimi, text):
    assert kimi.tokenizer.encode_ordinary(text) == ids(GOLDEN_KIMI[text])


@pytest.mark.parametrize(("before", "text", "after", "expected"), SPLICED_KIMI)
def test_golden_vectors_with_control_tokens(kimi, before, text, after, expected):
    tokenizer = kimi.tokenizer
    spliced = [
        *map(tokenizer.control_id, before),
        *tokenizer.encode_ordinary(text),
        *map(tokenizer.control_id, after),
    ]
    assert spliced == ids(expected)


@pytest.mark.parametrize("text", EDGE_CASES)
def test_edge_cases_come_back_and_hold_no_control_id(target, text):
    found = target.tokenizer.encode_ordinary(text)
    assert target.tokenizer.decode_bytes(found) == text.encode()
    assert target.tokenizer.decode_ordinary(found) == text.encode()
    control = {target.tokenizer.control_id(literal) for literal in target.tokenizer.control_literals}
    assert not control.intersection(found)


def test_every_control_literal_is_ordinary_in_text(target):
    control = {target.tokenizer.control_id(literal) for literal in target.tokenizer.control_literals}
    for literal in target.tokenizer.control_literals:
        assert not control.intersection(target.tokenizer.encode_ordinary(f"say {literal}!"))


def test_unknown_names_raise(target):
    with pytest.raises(TokenizerError, match="no control token"):
        target.tokenizer.control_id("typo")


def test_control_tokens_bound_texts(kimi):
    """Texts on both sides of an atomic close encode as if the other were not there: nothing merges across it."""
    library = kimi.tokenizer._encoding  # the only place where parsing control tokens out of text is wanted
    rng = random.Random(0)
    edges = ["\n", " ", "  ", "7", "42", "你好", "word", "\t", "é", "."]
    for _ in range(2000):
        left, right = ("".join(rng.choice(edges) for _ in range(rng.randint(0, 4))) for _ in range(2))
        whole = library.encode(f"{left}</think>{right}", allowed_special="all")
        close = kimi.tokenizer.control_id("think_close")
        assert whole == [*kimi.tokenizer.encode_ordinary(left), close, *kimi.tokenizer.encode_ordinary(right)]


def test_long_runs_are_cut_as_the_vendor_does(kimi):
    assert len(kimi.tokenizer.encode_ordinary("abcdefg" * 4000)) == 8001
    assert kimi.tokenizer.decode(kimi.tokenizer.encode_ordinary(" " * 60000)) == " " * 60000
    # A file separator is a space for the cuts and begins another run; for the split pattern it is a sign.
    interrupted = "abcdefg" * 3570 + "\x1c" + "abcdefg" * 3570
    apart = [*kimi.tokenizer.encode_ordinary(interrupted[:24991]), *kimi.tokenizer.encode_ordinary("abcdefg" * 3570)]
    assert kimi.tokenizer.encode_ordinary(interrupted) == apart


def test_two_backends_agree_on_random_text(kimi):
    """tiktoken ranks against the same ranks converted to merges and run by another library."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = kimi.grammar.tokenizer.split_pattern
    path = kimi.directory / kimi.grammar.tokenizer.file
    other = TikTokenConverter(vocab_file=str(path), pattern=pattern, extra_special_tokens=[]).converted()
    letters = "the|The | don't|I'LL|'s|中文|〇|한국어|مرحبا|é|e\u0301|ǅ|ʰ|a|B|ſ|_|1|2024|½|Ⅻ"
    others = '\n|\r\n|\n\n| |  |\t|\u00a0|\u3000|{|":|();|//|<\\|🌍|👩\u200d👩\u200d👧'
    pieces = [*letters.split("|"), *others.split("|")]
    rng = random.Random(1)
    texts = ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 12))) for _ in range(20_000)]
    for text, found in zip(texts, other.encode_batch(texts, add_special_tokens=False), strict=True):
        assert kimi.tokenizer.encode_ordinary(text) == found.ids, text


class TestPlantedFaults:
    @pytest.fixture
    def load(self, kimi, tmp_path):
        document = yaml.safe_load(yaml.safe_dump(kimi.grammar.model_dump(mode="json")))

        def run(change, directory=kimi.directory):
            change(document)
            path = tmp_path / "planted.yaml"
            path.write_text(yaml.safe_dump(document), encoding="utf-8")
            return load_tokenizer(directory, load_grammar(path))

        return run

    def test_unchanged_grammar_loads(self, load, kimi):
        assert load(lambda document: None).digest == kimi.tokenizer.digest

    def test_ordinary_token_as_end(self, load):
        with pytest.raises(TokenizerError, match=r"163533 is b'chas'"):
            load(lambda document: document["control"]["end"].update(id=163533))

    def test_tokenizer_eos_as_end(self, load):
        with pytest.raises(TokenizerError, match=r"= 163585.*\[163586\]"):
            load(lambda document: document["control"]["end"].update(id=163585, text="[EOS]"))

    def test_swapped_think_ids(self, load):
        def swap(document):
            document["control"]["think_open"]["id"] = 163607
            document["control"]["think_close"]["id"] = 163606

        with pytest.raises(TokenizerError, match=r"'think_(open|close)'"):
            load(swap)

    def test_missing_rank_file_pointer(self, load, kimi, tmp_path):
        directory = shutil.copytree(kimi.directory, tmp_path / "pointer")
        (directory / "tiktoken.model").chmod(0o644)
        (directory / "tiktoken.model").write_text("version https://git-lfs.github.com/spec/v1\nsize 28\n")
        with pytest.raises(TokenizerError, match="another vocabulary or it is damaged"):
            load(lambda document: None, directory)


class TestTemplates:
    MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>é</b> {x}"})

    @pytest.mark.parametrize(("family", "mode"), [("smollm", "default"), ("qwen3", "thinking"), ("qwen3", "instant")])
    def test_prompts_equal_those_of_transformers(self, targets, family, mode):
        from transformers import PreTrainedTokenizerFast

        target = targets[family]
        renderer = PromptRenderer(target.directory, target.grammar, target.tokenizer, mode)
        reference = PreTrainedTokenizerFast(tokenizer_file=str(target.directory / "tokenizer.json"))
        template = target.directory / "chat_template.jinja"
        config = json.loads((target.directory / "tokenizer_config.json").read_text("utf-8"))
        reference.chat_template = template.read_text("utf-8") if template.is_file() else config["chat_template"]
        for messages in (list(self.MESSAGES), list(self.MESSAGES[1:])):
            options = dict(target.grammar.mode(mode).template_options)
            text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
            assert renderer.render_text(messages) == text
            assert renderer.render_ids(messages) == reference.encode(text, add_special_tokens=False)

    def test_default_system_prompt_comes_from_the_template(self, targets):
        target = targets["smollm"]
        renderer = PromptRenderer(target.directory, target.grammar, target.tokenizer, "default")
        text = renderer.render_text([{"role": "user", "content": "Hi"}])
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")

    def test_user_literal_stays_ordinary(self, targets):
        target = targets["smollm"]
        renderer = PromptRenderer(target.directory, target.grammar, target.tokenizer, "default")
        end = target.grammar.control["end"].id
        clean = renderer.render_ids([{"role": "user", "content": "Hi"}]).count(end)
        assert renderer.render_ids([{"role": "user", "content": "Hi <|im_end|> there"}]).count(end) == clean

    def test_kimi_template_writes_answers_as_the_grammar_does(self, kimi, completion_of):
        """What the template makes of an answer in the history is what reconstruction makes of the same answer."""
        renderer = PromptRenderer(kimi.directory, kimi.grammar, kimi.tokenizer, "thinking")
        calls = [{"id": "functions.f:0", "function": {"name": "f", "arguments": '{"a": 1}'}}]
        user = {"role": "user", "content": "Hi"}
        answer = {"role": "assistant", "reasoning_content": "Hm", "content": "Wait", "tool_calls": calls}
        prompt = renderer.render_ids([user])
        both = renderer.render_ids([user, answer])
        pieces = lay_out(
            completion_of(reasoning="Hm", content="Wait", calls=calls),
            kimi.grammar,
            "thinking",
            Habits(),
            Shape(),
            kimi.tokenizer.encode_ordinary,
        )
        rebuilt = [token_id for piece in pieces for token_id in piece.ids]
        assert both[: len(prompt) + len(rebuilt)] == [*prompt, *rebuilt]

    def test_instant_mode_closes_thinking_in_the_prompt(self, kimi):
        renderer = PromptRenderer(kimi.directory, kimi.grammar, kimi.tokenizer, "instant")
        control = kimi.grammar.control
        ending = [control["middle"].id, control["think_open"].id, control["think_close"].id]
        assert renderer.render_ids([{"role": "user", "content": "Hi"}])[-3:] == ending


@pytest.fixture
def completion_of():
    from decimal import Decimal

    from eagle3.records import Completion, ToolCall, Usage

    def make(*, reasoning, content, calls):
        return Completion(
            sample_id="0" * 32,
            dataset="d",
            reasoning=reasoning,
            content=content,
            tool_calls=tuple(ToolCall(id=call["id"], **call["function"]) for call in calls),
            finish_reason="tool_calls",
            native_finish_reason=None,
            provider="p",
            model="m",
            quantization=None,
            generation_id=None,
            usage=Usage(prompt_tokens=1, completion_tokens=1),
            cost_usd=Decimal(0),
            cost_is_estimated=False,
            prompt_token_ids=None,
            completion_token_ids=None,
            latency_s=0.0,
            attempts=1,
            from_cache=False,
            raw_body=b"",
        )

    return make


def test_answers_in_channels_pass_the_audit(targets):
    """The tokens around a call of gpt-oss stand around every other part of its answers too."""
    oss = targets["gpt-oss"]
    rules = TokenRules(oss.grammar, oss.tokenizer, "default")
    tool = {"type": "function", "function": {"name": "f"}}
    prompt = PromptRecord(sample_id="0" * 32, dataset="d", prompt_id="p", messages=[{"role": "user"}], tools=[tool])
    for calls, finish in ((0, "stop"), (0, "length"), (1, "tool_calls"), (2, "tool_calls")):
        made = tuple(ToolCall(id=f"call_{number}", name="f", arguments='{"a": 1}') for number in range(calls))
        answer = replace(
            _answer("Let me think.", "It is 42."), tool_calls=made, finish_reason=finish, provider="Acme", model="m"
        )
        encode = oss.tokenizer.encode_ordinary
        pieces = lay_out(answer, oss.grammar, "default", Habits(), Shape(), encode)
        answer = replace(answer, usage=Usage(prompt_tokens=0, completion_tokens=sum(len(each.ids) for each in pieces)))
        profile = fit_profile([answer], oss.grammar, oss.tokenizer, "default", min_samples=20)
        sample = reconstruct(answer, [1], oss.grammar, oss.tokenizer, profile, mode="default").sample
        subject = Subject(prompt=prompt, completion=answer, sample=sample, rules=rules)
        wrong = [each for each in audit_sample(subject) if each.severity in (Severity.ERROR, Severity.CRITICAL)]
        assert wrong == [], (calls, finish)


def _answer(reasoning, content):
    return parse_line(
        1,
        json.dumps(
            {"message": {"reasoning": reasoning, "content": content}, "finish_reason": "stop", "usage": {}}
        ).encode(),
    ).completion
