"""Named checks of a family: each planted fault fails the check that is named for it, and only says so."""

import copy
import json
import shutil

import pytest
import yaml
from typer.testing import CliRunner

from eagle3.cli import app
from eagle3.records import Exactness
from eagle3.tokens.checklist import Outcome
from eagle3.tokens.checks import check_family
from eagle3.tokens.grammar import load_grammar, packaged_grammars
from eagle3.tokens.profiles import fit_profile
from eagle3.tokens.reconstruct import reconstruct
from eagle3.tokens.tokenizer import load_tokenizer


@pytest.fixture
def check(family, tmp_path):
    """Check the tiny family with a changed grammar, or in a changed copy of its directory."""

    def run(change=lambda document: None, spoil=None):
        document = copy.deepcopy(family.document)
        # Its template writes tool calls in no form of its own, so only answers of text are compared.
        del document["tools"]
        change(document)
        path = tmp_path / "family.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        directory = tmp_path / "target"
        shutil.copytree(family.directory, directory)
        if spoil is not None:
            spoil(directory)
        return {entry.name: entry for entry in check_family(directory, path)}

    return run


def failed(checks):
    return {name for name, entry in checks.items() if entry.outcome is Outcome.FAILED}


def test_whole_family_passes(check):
    checks = check()
    assert not failed(checks)
    assert {"tokenizer and template files", "vocabulary", "control tokens", "end of an answer"} <= set(checks)
    assert {f"generation prompt of mode {mode}" for mode in ("thinking", "opening", "plain")} <= set(checks)
    assert checks["answer of mode plain by the template: content"].outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda d: d["control"]["end"].update(id=70), "control end"),
        (lambda d: d["control"].update(end=d["control"]["eos"], eos=d["control"]["end"]), "end of an answer"),
        (lambda d: d["tokenizer"].update(vocab_size=9), "vocabulary"),
        (lambda d: d["tokenizer"].update(sha256=["0" * 64]), "tokenizer and template files"),
        (lambda d: d["tokenizer"].update(normalizer="nfc"), "tokenizer and template files"),
        (lambda d: d["modes"]["thinking"].update(prompt_ends_with="<|bot|>"), "generation prompt of mode thinking"),
        (lambda d: d.update(nonsense=1), "grammar file"),
    ],
)
def test_planted_faults(check, change, name):
    checks = check(change)
    assert name in failed(checks)
    assert checks[name].found


def test_a_template_that_writes_answers_in_another_way_is_worth_a_look(check):
    checks = check(lambda d: d["modes"]["plain"].update(content={"before": [{"text": "> "}]}))
    assert checks["answer of mode plain by the template: content"].outcome is Outcome.WARNING
    assert not failed(checks)


def test_swapped_think_ids(check):
    def swap(document):
        control = document["control"]
        control["think_open"]["id"], control["think_close"]["id"] = (
            control["think_close"]["id"],
            control["think_open"]["id"],
        )

    assert {"control think_open", "control think_close"} <= failed(check(swap))


def test_template_without_the_opener_of_thinking(check):
    def spoil(directory):
        path = directory / "chat_template.jinja"
        path.write_text(path.read_text().replace("{% if thinking %}<think>{% endif %}", ""))

    assert failed(check(spoil=spoil)) == {
        "generation prompt of mode thinking",
        "control literals in prompts of mode thinking",
    }


def test_missing_template_is_no_failure(check):
    checks = check(spoil=lambda directory: (directory / "chat_template.jinja").unlink())
    assert not failed(checks)
    assert checks["chat template"].outcome is Outcome.SKIPPED


def test_commands(family, tmp_path):
    runner = CliRunner()
    path = tmp_path / "family.yaml"
    document = copy.deepcopy(family.document)
    del document["tools"]
    path.write_text(yaml.safe_dump(document))
    arguments = ["grammar", "check", "--tokenizer", str(family.directory), "--grammar", str(path)]
    done = runner.invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["passed"]
    document["control"]["end"]["id"] = 70
    path.write_text(yaml.safe_dump(document))
    done = runner.invoke(app, arguments)
    assert done.exit_code == 2
    assert "control end" in done.output
    listed = json.loads(runner.invoke(app, ["grammar", "list", "--json"]).stdout)
    assert [entry["name"] for entry in listed] == packaged_grammars()
    assert "kimi-k2.5" in runner.invoke(app, ["grammar", "list"]).stdout


NEW_FAMILY = """
name: newcomer
version: 1
tokenizer: {kind: hf, file: tokenizer.json, vocab_size: VOCAB}
control:
  stop: {text: "<|end|>", id: END}
  bot: {text: "<|bot|>", id: BOT}
  thought: {text: "<think>", id: THINK}
  answer: {text: "</think>", id: CLOSE}
modes:
  deliberate:
    prompt_ends_with: "<|bot|>"
    reasoning:
      before: [{token: thought}, {text: "Let me see: "}]
      after: [{text: "\\n"}, {token: answer}, {text: "\\n\\n"}]
    close: answer
end:
  stop: [stop]
"""


def test_a_family_is_added_by_writing_only_a_grammar_file(family, completion, tmp_path):
    """Another way to think than any packaged family has: no code knows it."""
    ids = {token["text"]: token["id"] for token in family.document["control"].values()}
    text = NEW_FAMILY.replace("VOCAB", str(family.grammar.tokenizer.vocab_size))
    for name, literal in (("END", "<|end|>"), ("BOT", "<|bot|>"), ("THINK", "<think>"), ("CLOSE", "</think>")):
        text = text.replace(name, str(ids[literal]))
    path = tmp_path / "newcomer.yaml"
    path.write_text(text, encoding="utf-8")
    grammar = load_grammar(path)
    tokenizer = load_tokenizer(family.directory, grammar)
    encode = tokenizer.encode_ordinary
    expected = [
        ids["<think>"],
        *encode("Let me see: Hm\n"),
        ids["</think>"],
        *encode("\n\nHi"),
        ids["<|end|>"],
    ]
    answers = [completion("Hi", reasoning="Hm", billed=len(expected), number=number) for number in range(20)]
    profile = fit_profile(answers, grammar, tokenizer, "deliberate", min_samples=20)
    result = reconstruct(answers[0], [1], grammar, tokenizer, profile, mode="deliberate")
    assert list(result.sample.input_ids[1:]) == expected
    assert result.sample.exactness is Exactness.COUNT_VERIFIED
    checks = check_family(family.directory, path)
    assert [entry.name for entry in checks if entry.outcome is Outcome.FAILED] == []
