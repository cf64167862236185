"""Checks P1 to P9: grammar, tokenizer, template and model configuration name the same tokens. Needs no network.

The tokenizer is loaded without the checks that a run makes when it loads it, so that each of them is a row of its own.
"""

import json
import random
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml

from eagle3.artifacts import sha256_file
from eagle3.errors import TokenError
from eagle3.preflight.checks import Recorder, require
from eagle3.preflight.template_checks import check_template
from eagle3.recipe import Recipe
from eagle3.records import JsonObject
from eagle3.tokens.grammar import ResponseGrammar, grammar_of
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.tokenizer import Tokenizer, load_unchecked_tokenizer, read_json_file

TOKEN_FILES = ("tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")
NUM_FUZZ = 400
FUZZ_ALPHABET = "abcXYZ019 \t\n.,'\"{}[]<|>_-é\u00a0中文あ한🌍\u200d\u0301"
_CORRECT = "Correct the grammar, or use the files it was written for."


def check_tokens(recipe: Recipe, target: Path, recorder: Recorder) -> None:
    """Make checks P1 to P9 for a recipe and its prepared target."""
    grammar = _load_grammar(recipe, recorder)
    if grammar is None:
        return
    tokenizer = _check_files(grammar, target, recorder)
    if tokenizer is None:
        recorder.skip("P2-P9", "tokens", "the vocabulary could not be loaded")
        return
    _check_vocabulary(grammar, tokenizer, target, recorder)
    _check_control_tokens(grammar, tokenizer, recorder)
    _check_end(grammar, target, recorder)
    check_template(recipe, grammar, tokenizer, target, recorder)
    _check_unknown_names(tokenizer, recorder)
    _check_literals(recipe, grammar, tokenizer, target, recorder)
    _check_vectors(grammar, tokenizer, target, recorder)
    _check_boundary(recipe, grammar, tokenizer, recorder)


def _load_grammar(recipe: Recipe, recorder: Recorder) -> ResponseGrammar | None:
    with recorder.check("P0", "response grammar", "Correct target.grammar, target.mode or the grammar file.") as note:
        grammar = grammar_of(recipe)
        note(f"{grammar.name!r} version {grammar.version}, mode {recipe.target.mode!r}")
        return grammar
    return None


def _check_files(grammar: ResponseGrammar, target: Path, recorder: Recorder) -> Tokenizer | None:
    """P1: the vocabulary is the pinned one; every other file that decides ids is named with its digest."""
    name = "tokenizer and template files"
    with recorder.check("P1", name, "Fetch the model's own files again, or add the digest to the grammar.") as note:
        tokenizer = load_unchecked_tokenizer(target, grammar)
        vocabulary = grammar.tokenizer.file
        pinned = "pinned" if grammar.tokenizer.sha256 else "not pinned by the grammar"
        note(f"{vocabulary} sha256 {sha256_file(target / vocabulary)[:12]}… ({pinned})")
        others = [other for other in TOKEN_FILES if (target / other).is_file()]
        note(", ".join(f"{other} {sha256_file(target / other)[:12]}…" for other in others))
        return tokenizer
    return None


def _check_vocabulary(grammar: ResponseGrammar, tokenizer: Tokenizer, target: Path, recorder: Recorder) -> None:
    """P2: as many ids as the grammar and the model say, each with bytes, all 256 single bytes among them."""
    with recorder.check("P2", "vocabulary", "Tokenizer, grammar and weights must be of one model.") as note:
        size = tokenizer.vocab_size
        require(
            size == grammar.tokenizer.vocab_size,
            f"the tokenizer has {size} ids, grammar {grammar.name!r} expects {grammar.tokenizer.vocab_size}.",
        )
        singles: set[bytes] = set()
        num_missing = 0
        for token_id in range(size):
            try:
                piece = tokenizer.decode_bytes([token_id])
            except TokenError:
                num_missing += 1
                continue
            if len(piece) == 1:
                singles.add(piece)
        require(not num_missing or grammar.tokenizer.kind == "hf", f"{num_missing} of {size} ids stand for no bytes.")
        require(
            len(singles) == 256 or grammar.tokenizer.kind == "hf",
            f"{len(singles)} of the 256 single bytes have an id: some text has no encoding.",
        )
        config = read_json_file(target / "config.json")
        text_config = cast("JsonObject", config.get("text_config") or {})
        configured = config.get("vocab_size") or text_config.get("vocab_size")
        require(
            not isinstance(configured, int) or configured >= size,
            f"config.json gives the model {configured} ids, the tokenizer has {size}.",
        )
        unused = f", {num_missing} of them unused" if num_missing else ""
        rare = "" if len(singles) == 256 else ": text with the others cannot be encoded"
        note(
            f"{size} ids{unused}, {len(singles)} of 256 single bytes{rare}, config.json says {configured or 'nothing'}"
        )


def _check_control_tokens(grammar: ResponseGrammar, tokenizer: Tokenizer, recorder: Recorder) -> None:
    """P3: each named control token has its text, its id, and no ordinary text gives it."""
    with recorder.check("P3", "control tokens", _CORRECT) as note:
        for name, token in grammar.control.items():
            found = tokenizer.decode_bytes([token.id]) if token.id < tokenizer.vocab_size else b""
            require(
                found == token.text.encode(),
                f"{name!r} is {token.text!r} with id {token.id}, but that id stands for {found!r}.",
            )
            require(
                token.text in tokenizer.control_literals,
                f"{name!r}: {token.text!r} is no control token of the tokenizer files, id {token.id} is ordinary.",
            )
            by_text = tokenizer.control_id(token.text)
            require(by_text == token.id, f"{name!r} has id {token.id}, its text {token.text!r} has {by_text}.")
            ordinary = tokenizer.encode_ordinary(token.text)
            require(token.id not in ordinary, f"ordinary text {token.text!r} gives the control id {token.id}.")
        note(f"{len(grammar.control)} named tokens agree in text and id")


def _check_end(grammar: ResponseGrammar, target: Path, recorder: Recorder) -> None:
    """P4: the end of an answer is an end id of the model; the tokenizer's own `eos_token` is no guide."""
    ends = {name: grammar.control[name].id for names in grammar.end.values() for name in names}
    with recorder.check("P4", "end of an answer", _CORRECT) as note:
        configured: set[int] = set()
        for file in ("generation_config.json", "config.json"):
            values = read_json_file(target / file)
            text_config = cast("JsonObject", values.get("text_config") or {})
            found: Any = values.get("eos_token_id", text_config.get("eos_token_id"))
            configured |= {found} if isinstance(found, int) else set(cast("list[int]", found or []))
        require(ends, f"grammar {grammar.name!r} names no token that ends an answer.")
        for name in grammar.end.get("stop", ()):
            require(
                not configured or ends[name] in configured,
                f"answers end with {name!r} = {ends[name]}, the model's configuration names {sorted(configured)}.",
            )
        note(f"{ends}, configuration names {sorted(configured) or 'none'}")
    eos = read_json_file(target / "tokenizer_config.json").get("eos_token")
    text = cast("JsonObject", eos).get("content") if isinstance(eos, dict) else eos
    stop_texts = [grammar.control[name].text for name in grammar.end.get("stop", ())]
    if isinstance(text, str) and text not in stop_texts:
        recorder.warn(
            "P4",
            "eos_token of the tokenizer",
            f"tokenizer_config.json says {text!r}, answers end with {stop_texts}.",
            "Nothing here reads it. Servers that stop on it need the model's own end ids.",
        )


def _check_unknown_names(tokenizer: Tokenizer, recorder: Recorder) -> None:
    """P6: a name that nobody declared raises instead of becoming the unknown token."""
    with recorder.check("P6", "unknown token names", "This is a fault of the tokenizer backend: report it.") as note:
        for name in ("no_such_token", "<|no_such_token|>"):
            try:
                found = tokenizer.control_id(name)
            except TokenError:
                continue
            require(condition=False, problem=f"{name!r} is no token, but it gave id {found}.")
        note("they raise")


def _check_literals(
    recipe: Recipe, grammar: ResponseGrammar, tokenizer: Tokenizer, target: Path, recorder: Recorder
) -> None:
    """P7: the text of a control token in a conversation stays ordinary."""
    with recorder.check("P7", "control literals in prompts", "Use another chat template.") as note:
        renderer = PromptRenderer(target, grammar, tokenizer, recipe.target.mode, recipe.target.template_options)
        literals = sorted(tokenizer.control_literals)
        control = {tokenizer.control_id(literal) for literal in literals}
        plain = renderer.render_ids([{"role": "user", "content": "x"}])
        spiked = renderer.render_ids([{"role": "user", "content": " ".join(["x", *literals])}])
        expected = [token_id for token_id in plain if token_id in control]
        found = [token_id for token_id in spiked if token_id in control]
        require(found == expected, f"{len(found)} control ids with literals in the text, expected {len(expected)}.")
        note(f"{len(literals)} literals stay ordinary text")


def _check_vectors(grammar: ResponseGrammar, tokenizer: Tokenizer, target: Path, recorder: Recorder) -> None:
    """P8: published vectors, a second backend where there is one, and texts that come back unchanged."""
    advice = "The vocabulary, its split pattern or its reader is wrong: do not use this tokenizer."
    with recorder.check("P8", "texts come back unchanged", advice) as note:
        texts = _fuzz_texts()
        is_normalised = grammar.tokenizer.normalizer != "none"
        for text in texts:
            back = tokenizer.decode_bytes(tokenizer.encode_ordinary(text))
            require(is_normalised or back == text.encode(), f"{text!r} comes back as {back!r}.")
        note(f"{len(texts)} texts" + (", up to Unicode normalisation" if is_normalised else ""))
    digest = sha256_file(target / grammar.tokenizer.file)
    vectors = _vectors_of(digest)
    if not vectors:
        recorder.skip("P8", "published vectors", f"none are known for vocabulary {digest[:12]}…")
    else:
        with recorder.check("P8", "published vectors", advice) as note:
            for text, ids in vectors:
                found = tokenizer.encode_ordinary(text)
                require(found == ids, f"{text!r} gives {found[:8]}, published are {ids[:8]}.")
            note(f"{len(vectors)} of {len(vectors)} give the published ids")
    other = target / "tokenizer.json"
    if grammar.tokenizer.kind == "tiktoken" and other.is_file():
        with recorder.check("P8", "second backend", advice) as note:
            encode = _library_encoder(other)
            for text in (texts := _fuzz_texts()):
                found, given = tokenizer.encode_ordinary(text), encode(text)
                require(found == given, f"{text!r} gives {found[:8]}, tokenizer.json gives {given[:8]}.")
            note(f"{len(texts)} texts give the ids of tokenizer.json")
    else:
        recorder.skip("P8", "second backend", "the target has one vocabulary file")


def _vectors_of(digest: str) -> list[tuple[str, list[int]]]:
    """Return published (text, ids) pairs of a vocabulary."""
    document: Any = yaml.safe_load((files("eagle3.preflight") / "vectors.yaml").read_text(encoding="utf-8"))
    return [(str(entry["text"]), list(entry["ids"])) for entry in document.get(digest, ())]


def _library_encoder(path: Path) -> Any:
    import tokenizers  # noqa: PLC0415 - only where a second backend is at hand

    document = json.loads(path.read_bytes())
    document["added_tokens"] = []
    library: Any = tokenizers.Tokenizer.from_str(json.dumps(document))
    return lambda text: list(library.encode(text, add_special_tokens=False).ids)


def _fuzz_texts() -> list[str]:
    source = random.Random(0)  # noqa: S311 - test texts, the same each time
    return ["".join(source.choices(FUZZ_ALPHABET, k=source.randint(1, 40))) for _ in range(NUM_FUZZ)]


def _check_boundary(recipe: Recipe, grammar: ResponseGrammar, tokenizer: Tokenizer, recorder: Recorder) -> None:
    """P9: the close of reasoning is one token, so that what stands before and after it cannot merge with it."""
    close = grammar.mode(recipe.target.mode).close
    if close is None:
        recorder.skip("P9", "close of reasoning", "this mode generates none")
        return
    advice = "A close that is ordinary text merges with its neighbours; this grammar schema cannot describe it."
    with recorder.check("P9", "close of reasoning", advice) as note:
        token = grammar.control[close]
        for before, after in (("x", "y"), ("so.\n", "\n\nIt"), ("3 ", " 4"), ("是", "好")):
            spliced = [*tokenizer.encode_ordinary(before), token.id, *tokenizer.encode_ordinary(after)]
            whole = f"{before}{token.text}{after}"
            require(tokenizer.decode(spliced) == whole, f"{whole!r} spliced decodes to {tokenizer.decode(spliced)!r}.")
            ordinary = tokenizer.encode_ordinary(whole)
            require(token.id not in ordinary, f"ordinary text {whole!r} holds the close id {token.id}.")
        note(f"{token.text!r} is the single token {token.id}")


def check_offline(recipe: Recipe, target: Path) -> Recorder:
    """Make checks P1 to P9 and return them; never raises for what they find.

    Raises:
        Eagle3Error: Something outside of the checks is wrong.
    """
    recorder = Recorder()
    with recorder.check("P0", "tokens", "Correct the target or the recipe.") as note:
        check_tokens(recipe, target, recorder)
        note("all checks were made")
    return recorder
