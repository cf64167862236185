"""Grammars: every rule of the schema, by a file that breaks it."""

import copy
from pathlib import Path

import pytest

from eagle3.errors import GrammarError
from eagle3.recipe import recipe_from_mapping
from eagle3.tokens.grammar import grammar_of, load_grammar, packaged_grammars


def load_changed(family, tmp_path, change):
    import yaml

    document = copy.deepcopy(family.document)
    change(document)
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_grammar(path)


@pytest.mark.parametrize("name", packaged_grammars())
def test_packaged_grammars_load_and_are_named_like_their_files(name):
    assert load_grammar(name).name == name


def test_packaged_families():
    assert {"smollm", "kimi-k2.5", "kimi-k2", "qwen3", "deepseek-v4", "gpt-oss", "llama-3"} <= set(packaged_grammars())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["end"].update(stop=["typo"]), "'typo' is not declared"),
        (lambda d: d["modes"]["thinking"].update(close="typo"), "'typo' is not declared"),
        (lambda d: d["tools"]["before"].append({"token": "typo"}), "'typo' is not declared"),
        (lambda d: d["modes"]["plain"].update(close="think_close"), "go together"),
        (lambda d: d["control"]["user"].update(id=d["control"]["end"]["id"]), "share an id"),
        (lambda d: d["control"]["user"].update(text=d["control"]["end"]["text"]), "share an id or a text"),
        (lambda d: d["tools"]["call"].append({"token": "end", "text": "x"}), "exactly one"),
        (lambda d: d["tools"]["call"].append({"token": "end", "padding": True}), "only text"),
        (lambda d: d["tokenizer"].update(kind="tiktoken"), "needs split_pattern"),
        (lambda d: d.update(variants={"end_billed": []}), "at least one"),
        (lambda d: d.update(surprise=1), "surprise"),
    ],
)
def test_broken_rules_are_named(family, tmp_path, change, message):
    with pytest.raises(GrammarError, match=message):
        load_changed(family, tmp_path, change)


def test_unknown_grammar_lists_the_packaged_ones():
    with pytest.raises(GrammarError, match=r"kimi-k2\.5"):
        load_grammar("kimi-k9")


def test_broken_yaml(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("a: [", encoding="utf-8")
    with pytest.raises(GrammarError, match="not valid YAML"):
        load_grammar(path)


def test_unknown_mode(family):
    with pytest.raises(GrammarError, match="no mode 'dreaming'"):
        family.grammar.mode("dreaming")


def test_digest_follows_the_content(family, tmp_path):
    same = load_changed(family, tmp_path, lambda d: None)
    other = load_changed(family, tmp_path, lambda d: d["end"].update(length=["end"]))
    assert same.digest == family.grammar.digest != other.digest


def test_a_recipe_may_name_a_grammar_file_beside_it(family, tmp_path):
    load_changed(family, tmp_path, lambda d: None)
    values = {
        "name": "r",
        "target": {
            "name": "t",
            "weights": {"kind": "directory", "path": "t"},
            "grammar": "changed.yaml",
            "mode": "thinking",
        },
        "prompts": {"datasets": [{"name": "a", "path": "a.jsonl"}]},
        "generation": {"provider": {"kind": "openrouter", "model": "m"}, "budget_usd": 1},
        "corpus": {"max_sample_tokens": 2048},
    }
    assert grammar_of(recipe_from_mapping(values, tmp_path)).name == "tiny"
    values["target"]["mode"] = "dreaming"
    with pytest.raises(GrammarError, match="dreaming"):
        grammar_of(recipe_from_mapping(values, Path(tmp_path)))
