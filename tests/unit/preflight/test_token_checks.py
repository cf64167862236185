"""Every planted fault is found by the check that is meant for it, and says what was expected and found."""

import shutil
from pathlib import Path

import pytest
import yaml

from eagle3.artifacts import RunDirectory, Stage
from eagle3.errors import PreflightError
from eagle3.preflight import Outcome, check_offline, run_checks
from eagle3.recipe import Recipe, recipe_from_mapping
from tests.unit.conftest import recipe_values


def found_as(outcome: Outcome, target: Path, mode: str) -> dict[str, str]:
    recipe = recipe_from_mapping(recipe_values(target, mode=mode), target)
    return {check.id: check.found for check in check_offline(recipe, target).checks if check.outcome is outcome}


def failures(target: Path, *, mode: str = "thinking") -> dict[str, str]:
    return found_as(Outcome.FAILED, target, mode)


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def change_grammar(target: Path, change) -> None:
    path = target / "grammar.yaml"
    grammar = yaml.safe_load(path.read_text())
    change(grammar)
    path.write_text(yaml.safe_dump(grammar, sort_keys=False))


@pytest.mark.parametrize("mode", ["thinking", "plain"])
def test_a_sound_target_fails_nowhere(target, mode):
    assert failures(target, mode=mode) == {}


def test_an_end_id_that_is_an_ordinary_token(target):
    change_grammar(target, lambda grammar: grammar["control"]["end"].update(id=99))
    assert "'end' is '<end>' with id 99 in the grammar, but in the tokenizer id 99 is b'c'" in failures(target)["P3"]


def test_an_end_id_that_the_model_does_not_stop_on(target):
    (target / "config.json").write_text('{"eos_token_id": 265, "vocab_size": 267}')
    assert "ends answers with 'end' = 256, but config.json name [265]" in failures(target)["P4"]


def test_swapped_ids_of_thinking(target):
    def swap(grammar):
        control = grammar["control"]
        opened, closed = control["think_open"]["id"], control["think_close"]["id"]
        control["think_open"]["id"], control["think_close"]["id"] = closed, opened

    change_grammar(target, swap)
    assert "control token 'think_close' is '</think>' with id" in failures(target)["P3"]


def test_a_template_that_does_not_open_the_thinking(target):
    template = target / "chat_template.jinja"
    template.write_text(template.read_text().replace("<think>", ""))
    assert "expects '<bot><think>'" in failures(target)["P5"]


def test_a_template_that_writes_answers_in_another_way(target):
    template = target / "chat_template.jinja"
    user, bot = "<user>{{ m.content }}<end>", "<bot>{{ m.content }}<end>"
    turns = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + bot + "{% else %}" + user + "{% endif %}{% endfor %}"
    )
    template.write_text(turns + "{% if add_generation_prompt %}<bot>{% endif %}")
    change_grammar(target, lambda grammar: grammar.pop("tools"))
    assert "P5" not in found_as(Outcome.WARNING, target, "plain")
    template.write_text(template.read_text().replace(bot, bot.replace("<end>", "!<end>")))
    assert "the template writes '!<end>'" in found_as(Outcome.WARNING, target, "plain")["P5"]


def test_a_token_name_that_nobody_declared(target):
    change_grammar(target, lambda grammar: grammar["end"].update(stop=["no_such_token"]))
    assert "control token 'no_such_token' is not declared" in failures(target)["P0"]


def test_another_vocabulary_size(target):
    change_grammar(target, lambda grammar: grammar["tokenizer"].update(vocab_size=300))
    assert "the tokenizer has 267 ids, grammar 'tiny' expects 300" in failures(target)["P2"]


def test_a_vocabulary_with_another_digest(target):
    change_grammar(target, lambda grammar: grammar["tokenizer"].update(sha256=["0" * 64]))
    assert "it is another vocabulary" in failures(target)["P1"]


def test_weights_with_fewer_ids_than_the_tokenizer(target):
    (target / "config.json").write_text('{"eos_token_id": 256, "vocab_size": 100}')
    assert "'config.json' gives the model 100 ids" in failures(target)["P2"]


@pytest.fixture
def kimi(shared_data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_data / "kimi-k2.5", tmp_path / "kimi"))


def kimi_recipe(target: Path, mode: str = "thinking", **changes: int) -> Recipe:
    from eagle3.tokens.grammar import load_grammar

    grammar = load_grammar("kimi-k2.5").model_dump(mode="json")
    for name, token_id in changes.items():
        grammar["control"][name]["id"] = token_id
    (target / "grammar.yaml").write_text(yaml.safe_dump(grammar, sort_keys=False))
    return recipe_from_mapping(recipe_values(target, mode=mode), target)


@pytest.mark.parametrize("mode", ["thinking", "instant"])
def test_the_real_kimi_files_pass_everything(kimi, mode):
    checks = check_offline(kimi_recipe(kimi, mode), kimi).checks
    assert [check for check in checks if check.outcome is Outcome.FAILED] == []
    assert any(check.name == "published vectors" and check.outcome is Outcome.PASSED for check in checks)


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"end": 163533}, "P3", "id 163533 is b'chas'"),
        ({"end": 163585}, "P3", "id 163585 is b'[EOS]'"),
        ({"think_open": 163607, "think_close": 163606}, "P3", "'think_close' is '</think>' with id 163606"),
    ],
)
def test_the_known_traps_of_kimi(kimi, changes, check, words):
    found = {
        entry.id: entry.found
        for entry in check_offline(kimi_recipe(kimi, **changes), kimi).checks
        if entry.outcome is Outcome.FAILED
    }
    assert words in found[check]


def test_an_answer_that_ends_with_the_tokenizers_own_eos(kimi):
    recipe = kimi_recipe(kimi)
    change_grammar(kimi, lambda grammar: grammar["control"]["end"].update(text="[EOS]", id=163585))
    found = {c.id: c.found for c in check_offline(recipe, kimi).checks if c.outcome is Outcome.FAILED}
    assert "ends answers with 'end' = 163585, but config.json name [163586]" in found["P4"]


def test_an_unfit_machine_is_told_before_spending(tiny_run, monkeypatch, tmp_path):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    report = run_checks(tiny_run.recipe, tiny_run.run, tiny_run.target, [Stage.PROMPTS, Stage.COMPLETIONS])
    found = {check.id: check for check in report.failed}
    assert "'one.jsonl' is no file" in found["E2"].found
    assert "'OPENROUTER_API_KEY' is not set" in found["E3"].found
    with pytest.raises(PreflightError, match="nothing was spent") as caught:
        report.raise_if_failed()
    assert caught.value.exit_code == 2
    assert str(tmp_path) not in str(caught.value)


def test_hidden_states_that_do_not_fit_the_disk(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "x")
    (tmp_path / "one.jsonl").write_text('{"messages": []}\n' * 1000)
    target = Path(shutil.copytree(tiny_run.target, tmp_path / "wide"))
    (target / "config.json").write_text('{"eos_token_id": 256, "vocab_size": 267, "hidden_size": 1000000000}')
    run = RunDirectory(tmp_path / "not-there")
    report = run_checks(tiny_run.recipe, run, target, [Stage.PROMPTS, Stage.HIDDEN_STATES])
    assert "GB are free" in {check.id: check.found for check in report.failed}["E5"]
