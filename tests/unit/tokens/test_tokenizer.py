"""Tokenizers: nothing but ids come in, and a grammar that names wrong tokens is caught when it is loaded."""

import base64
import copy
import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import TokenizerError
from eagle3.tokens.grammar import load_grammar
from eagle3.tokens.hf_backend import byte_alphabet
from eagle3.tokens.tiktoken_backend import TiktokenTokenizer, cut_text, parse_ranks
from eagle3.tokens.tokenizer import load_tokenizer


@pytest.fixture
def document(family):
    return copy.deepcopy(family.document)


@pytest.fixture
def target(family, tmp_path):
    """A copy of the target directory that a test may damage."""
    return shutil.copytree(family.directory, tmp_path / "target")


@given(text=st.text())
def test_text_comes_back(family, text):
    ids = family.tokenizer.encode_ordinary(text)
    assert family.tokenizer.decode_bytes(ids) == text.encode()
    assert family.tokenizer.decode(ids) == text


@given(text=st.lists(st.sampled_from(["<|end|>", "<think>", "</think>", "[EOS]", "<|", "x", " "])).map("".join))
def test_literals_stay_ordinary(family, text):
    control = {token.id for token in family.grammar.control.values()}
    assert not control.intersection(family.tokenizer.encode_ordinary(text))


def test_control_ids_by_name_and_by_text(family):
    end = family.grammar.control["end"]
    assert family.tokenizer.control_id("end") == family.tokenizer.control_id("<|end|>") == end.id
    assert family.tokenizer.decode([end.id]) == "<|end|>"


@pytest.mark.parametrize("name", ["im_end", "<|im_end|>", ""])
def test_unknown_control_token_raises(family, name):
    with pytest.raises(TokenizerError, match="no control token"):
        family.tokenizer.control_id(name)


def test_lone_surrogate_is_refused(family):
    with pytest.raises(TokenizerError, match="cannot be encoded"):
        family.tokenizer.encode_ordinary("a\ud800b")


def test_id_beyond_the_vocabulary_is_refused(family):
    with pytest.raises(TokenizerError, match="not in the vocabulary"):
        family.tokenizer.decode_bytes([family.tokenizer.vocab_size])


def test_end_id_that_is_an_ordinary_token_is_caught(family, document, tmp_path):
    document["control"]["end"]["id"] = family.tokenizer.encode_ordinary("answer")[0]
    with pytest.raises(TokenizerError, match="control token 'end'"):
        family.load(document, tmp_path)


def test_tokenizer_eos_as_end_is_caught(family, document, tmp_path):
    document["end"] = {"stop": ["eos"]}
    with pytest.raises(TokenizerError, match="no guide"):
        family.load(document, tmp_path)


def test_swapped_think_ids_are_caught(family, document, tmp_path):
    control = document["control"]
    control["think_open"]["id"], control["think_close"]["id"] = (
        control["think_close"]["id"],
        control["think_open"]["id"],
    )
    with pytest.raises(TokenizerError, match="think_"):
        family.load(document, tmp_path)


def test_control_text_that_is_no_control_token_is_caught(family, document, tmp_path):
    ordinary = family.tokenizer.encode_ordinary("answer")[0]
    document["control"]["end"] = {"text": family.tokenizer.decode([ordinary]), "id": ordinary}
    with pytest.raises(TokenizerError, match="no control token"):
        family.load(document, tmp_path)


def test_vocabulary_of_another_size_is_caught(family, document, tmp_path):
    document["tokenizer"]["vocab_size"] += 1
    with pytest.raises(TokenizerError, match="not the vocabulary"):
        family.load(document, tmp_path)


def test_vocabulary_with_another_digest_is_caught(family, document, tmp_path):
    document["tokenizer"]["sha256"] = ["0" * 64]
    with pytest.raises(TokenizerError, match="another vocabulary"):
        family.load(document, tmp_path)


def test_control_token_that_ordinary_text_can_spell_is_caught(family, document, target, tmp_path):
    word = "The"
    (word_id,) = family.tokenizer.encode_ordinary(word)
    values = json.loads((target / "tokenizer.json").read_text("utf-8"))
    values["added_tokens"].append({"id": word_id, "content": word})
    (target / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    document["control"]["user"] = {"text": word, "id": word_id}
    path = tmp_path / "smuggling.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(TokenizerError, match="smuggle"):
        load_tokenizer(target, load_grammar(path))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_model_configuration(family, target, content):
    (target / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"config\.json"):
        load_tokenizer(target, family.grammar)


def test_undeclared_normalizer_is_caught(family, target):
    values = json.loads((target / "tokenizer.json").read_text("utf-8"))
    values["normalizer"] = {"type": "NFC"}
    (target / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(TokenizerError, match="normalises"):
        load_tokenizer(target, family.grammar)


def test_vocabulary_that_is_not_byte_level_is_refused(family, target):
    values = json.loads((target / "tokenizer.json").read_text("utf-8"))
    values["decoder"] = {"type": "ByteFallback"}
    (target / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(TokenizerError, match="byte-level"):
        load_tokenizer(target, family.grammar)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_missing_or_damaged_vocabulary(family, target, content):
    (target / "tokenizer.json").unlink()
    if content is not None:
        (target / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(target, family.grammar)


def test_model_with_fewer_ids_than_the_tokenizer(family, target):
    (target / "config.json").write_text(json.dumps({"vocab_size": 5, "eos_token_id": 0}), encoding="utf-8")
    with pytest.raises(TokenizerError, match="do not belong together"):
        load_tokenizer(target, family.grammar)


def test_end_ids_may_be_a_list_or_nested(family, target):
    end = family.grammar.control["end"].id
    for values in ({"eos_token_id": [1, end]}, {"text_config": {"eos_token_id": end}}):
        (target / "config.json").write_text(json.dumps(values), encoding="utf-8")
        assert load_tokenizer(target, family.grammar).digest == family.tokenizer.digest


def test_byte_alphabet_is_a_bijection():
    assert sorted(byte_alphabet().values()) == list(range(256))


def rank_file(tokens):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


BYTES = [bytes([byte]) for byte in range(256)]


def test_rank_file_round_trip():
    assert parse_ranks(rank_file([*BYTES, b"ab"]), "r")[b"ab"] == 256


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 28\n", "line 1"),
        (rank_file(BYTES)[:-2], "line 256"),
        (rank_file([*BYTES, b"ab"]).replace(b" 256", b" 257"), "line 257"),
        (rank_file([*BYTES, b"a"]), "line 257"),
        (rank_file(BYTES[:-1]), "lacks 1 of the 256"),
        (b"", "lacks 256"),
    ],
)
def test_damaged_rank_files(data, message):
    with pytest.raises(TokenizerError, match=message):
        parse_ranks(data, "ranks")


@pytest.fixture
def tiktoken_family(tmp_path):
    (tmp_path / "ranks").write_bytes(rank_file([*BYTES, b"ab", b"abab"]))
    path = tmp_path / "g.yaml"
    path.write_text(
        "name: t\nversion: 1\n"
        "tokenizer: {kind: tiktoken, file: ranks, vocab_size: 262, num_control: 4, split_pattern: '\\S+|\\s+', "
        "reserved_name: '<r{id}>', max_chunk_chars: 8, max_run_chars: 5}\n"
        "control: {end: {text: '<end>', id: 258}}\n"
        "modes: {default: {prompt_ends_with: ''}}\nend: {stop: [end]}\n",
        encoding="utf-8",
    )
    return tmp_path, load_grammar(path)


def test_tiktoken_reserved_names_and_cuts(tiktoken_family):
    directory, grammar = tiktoken_family
    tokenizer = load_tokenizer(directory, grammar)
    assert tokenizer.control_literals == {"<end>", "<r259>", "<r260>", "<r261>"}
    assert tokenizer.encode_ordinary("abab") == [257]
    assert tokenizer.encode_ordinary("ababab") == [257, 97, 98]  # the run is cut after five characters
    assert tokenizer.decode(tokenizer.encode_ordinary("<end>é")) == "<end>é"
    with pytest.raises(TokenizerError, match="cannot be encoded"):
        tokenizer.encode_ordinary("\ud800")
    with pytest.raises(TokenizerError, match="not in the vocabulary"):
        tokenizer.decode_bytes([262])


def test_tiktoken_control_token_outside_its_range(tiktoken_family):
    directory, grammar = tiktoken_family
    (directory / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"5": {"content": "<end>"}}}')
    with pytest.raises(TokenizerError, match="do not belong together"):
        TiktokenTokenizer(directory, grammar)


def test_tiktoken_needs_a_name_for_every_control_id(tiktoken_family):
    directory, grammar = tiktoken_family
    nameless = grammar.model_copy(update={"tokenizer": grammar.tokenizer.model_copy(update={"reserved_name": None})})
    with pytest.raises(TokenizerError, match="no text of its own"):
        TiktokenTokenizer(directory, nameless)


@given(text=st.text(alphabet="ab \n", max_size=60), chunk=st.integers(1, 20), run=st.integers(1, 20))
def test_cuts_lose_nothing_and_bound_runs(text, chunk, run):
    pieces = list(cut_text(text, chunk, run))
    assert "".join(pieces) == text
    for piece in pieces:
        assert len(piece) <= chunk
        assert max((len(part) for part in piece.split()), default=0) <= run


def test_ordinary_decoding_takes_ordinary_ids_only(family):
    tokenizer = family.tokenizer
    ids = tokenizer.encode_ordinary("Hello there, 你好")
    assert tokenizer.decode_ordinary(ids) == "Hello there, 你好".encode()
    assert tokenizer.decode_ordinary(ids[:1]) == tokenizer.decode_bytes(ids[:1])
    assert tokenizer.decode_ordinary([]) == b""
    # The last ones would be `ids[0]` in a table that is counted from its end, whatever is put there.
    around = [ids[0] - times * tokenizer.vocab_size for times in (1, 2, 3)]
    for wrong in (tokenizer.control_id("end"), -1, tokenizer.vocab_size, 10**9, *around):
        for spoiled in ([wrong], [*ids, wrong], [wrong, *ids]):
            with pytest.raises(TokenizerError, match=f"id {wrong} is no ordinary token"):
                tokenizer.decode_ordinary(spoiled)


def test_a_close_that_is_ordinary_text_is_refused(family, tmp_path):
    """Text merges with its neighbours: encoded apart it would give other ids than the model's."""
    encode = family.tokenizer.encode_ordinary
    assert encode("The answer") != [*encode("The ans"), *encode("wer")]
    document = copy.deepcopy(family.document)
    document["control"]["think_close"] = {"text": "answer", "id": encode("answer")[0]}
    with pytest.raises(TokenizerError, match="'answer' is no control token"):
        family.load(document, tmp_path)
