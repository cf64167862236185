"""Checks of a model family: grammar, tokenizer, model configuration and template held against one another.

`load_tokenizer` refuses the first thing that is wrong; these look at everything and tell each result apart. `eagle3
grammar check` makes them for people who write a grammar, `eagle3 preflight` and every paid run before money is spent.
They need files only: no network, no weights.
"""

import json
import random
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from eagle3.artifacts import sha256_file
from eagle3.errors import TokenError
from eagle3.records import JsonObject
from eagle3.tokens.checklist import Check, Recorder, require
from eagle3.tokens.grammar import ResponseGrammar, load_grammar
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.template_checks import check_literals, check_template
from eagle3.tokens.tokenizer import (
    Tokenizer,
    check_end,
    check_size,
    control_mistakes,
    load_unchecked_tokenizer,
    read_json_file,
)

TOKEN_FILES = ("tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")
NUM_FUZZ = 400
FUZZ_ALPHABET = "abcXYZ019 \t\r\n.,'\"{}[]<|>_-é\u00a0\ufeff\u2028\x00\x1c中文あ한🌍\u200d\u0301"
TemplateOptions = Mapping[str, bool | int | str]
_CORRECT = "Correct the grammar, or use the files it was written for."


def check_family(directory: Path, source: str | Path) -> list[Check]:
    """Make all checks for every mode of a grammar; never raises for what they find.

    Args:
        directory: Tokenizer files, and usually `config.json` and the chat template.
        source: Name of a packaged grammar, or a path to a YAML file.
    """
    recorder = Recorder()
    grammar = _load_grammar(source, recorder)
    if grammar is not None:
        check_tokens(grammar, directory, grammar.modes, {}, recorder, needs_template=False)
    return recorder.checks


def _load_grammar(source: str | Path, recorder: Recorder) -> ResponseGrammar | None:
    with recorder.check("P0", "grammar file", "Correct the file; docs/grammars.md describes it.") as note:
        grammar = load_grammar(source)
        note(f"{grammar.name} version {grammar.version}")
        return grammar
    return None


def check_tokens(
    grammar: ResponseGrammar,
    directory: Path,
    modes: Iterable[str],
    options: TemplateOptions,
    recorder: Recorder,
    *,
    needs_template: bool = True,
) -> None:
    """Make the checks P1 to P9.

    Args:
        grammar: Well-formed; nothing else is taken for granted.
        directory: Tokenizer files, configuration and chat template of the model.
        modes: Modes whose prompts and answers are looked at.
        options: Template variables beside those of the modes.
        recorder: Takes the outcomes.
        needs_template: Fail without a chat template; else what needs one is skipped.
    """
    tokenizer = _load(grammar, directory, recorder)
    if tokenizer is None:
        recorder.skip("P2-P9", "tokens", "the vocabulary could not be loaded")
        return
    _check_vocabulary(grammar, tokenizer, directory, recorder)
    _check_control_tokens(grammar, tokenizer, recorder)
    config: JsonObject = {}
    with recorder.check("P1", "tokenizer_config.json", "Restore the file.") as note:
        config = read_json_file(directory / "tokenizer_config.json")
        note(f"{len(config)} entries" if config else "not there")
    _check_end(grammar, directory, config, recorder)
    has_template = (directory / "chat_template.jinja").is_file() or bool(config.get("chat_template"))
    if has_template or grammar.chat_template or needs_template:
        _check_modes(grammar, tokenizer, directory, modes, options, recorder)
    else:
        recorder.skip("P5", "chat template", "neither chat_template.jinja nor one in tokenizer_config.json")
    _check_unknown_names(tokenizer, recorder)
    _check_literals(tokenizer, recorder)
    _check_vectors(grammar, tokenizer, directory, recorder)
    for mode in modes:
        _check_boundary(grammar, tokenizer, mode, recorder)


def _load(grammar: ResponseGrammar, target: Path, recorder: Recorder) -> Tokenizer | None:
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
        stated = check_size(grammar, target) or "the model's configuration says nothing"
        unused = f", {num_missing} of them unused" if num_missing else ""
        rare = "" if len(singles) == 256 else ": text with the others cannot be encoded"
        note(f"{size} ids{unused}, {len(singles)} of 256 single bytes{rare}, {stated}")


def _check_control_tokens(grammar: ResponseGrammar, tokenizer: Tokenizer, recorder: Recorder) -> None:
    """P3: each named control token has its text, its id, and no ordinary text gives it; each wrong one is a failure."""
    mistakes = {name: control_mistakes(tokenizer, name, token) for name, token in grammar.control.items()}
    wrong = {name: mistake for name, mistake in mistakes.items() if mistake is not None}
    for name, mistake in wrong.items():
        with recorder.check("P3", f"control {name}", _CORRECT):
            require(condition=False, problem=mistake)
    if not wrong:
        with recorder.check("P3", "control tokens", _CORRECT) as note:
            note(f"{len(grammar.control)} named tokens agree in text and id")


def _check_end(grammar: ResponseGrammar, target: Path, config: JsonObject, recorder: Recorder) -> None:
    """P4: the end of an answer is an end id of the model; the tokenizer's own `eos_token` is no guide."""
    ends = {name: grammar.control[name].id for names in grammar.end.values() for name in names}
    with recorder.check("P4", "end of an answer", _CORRECT) as note:
        require(ends, f"grammar {grammar.name!r} names no token that ends an answer.")
        note(f"{ends}, among {check_end(grammar, target)}")
    eos: Any = config.get("eos_token")
    text: object = eos.get("content") if isinstance(eos, dict) else eos
    stop_texts = [grammar.control[name].text for name in grammar.end.get("stop", ())]
    if isinstance(text, str) and text not in stop_texts:
        recorder.warn(
            "P4",
            "eos_token of the tokenizer",
            f"tokenizer_config.json says {text!r}, answers end with {stop_texts}.",
            "Nothing here reads it. Servers that stop on it need the model's own end ids.",
        )


def _check_modes(
    grammar: ResponseGrammar,
    tokenizer: Tokenizer,
    target: Path,
    modes: Iterable[str],
    options: TemplateOptions,
    recorder: Recorder,
) -> None:
    """P5 and P7, which need the chat template."""
    for mode in modes:
        advice = "Put the model's own template beside its tokenizer."
        with recorder.check("P5", "chat template", advice) as note:
            renderer = PromptRenderer(target, grammar, tokenizer, mode, options)
            note(f"compiles, prompts of mode {mode} by sha256 {renderer.digest[:12]}…")
            check_template(renderer, recorder)
            check_literals(renderer, recorder)


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


def _check_literals(tokenizer: Tokenizer, recorder: Recorder) -> None:
    """P7: the text of a control token inside ordinary text stays ordinary."""
    with recorder.check("P7", "control literals in text", "The vocabulary file is none this project can use.") as note:
        literals = sorted(tokenizer.control_literals)
        control = {tokenizer.control_id(literal) for literal in literals}
        parsed = [each for each in literals if control.intersection(tokenizer.encode_ordinary(f"say {each}!"))]
        require(not parsed, f"control ids come out of {parsed[:5]}: prompts could smuggle control tokens in.")
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
    document: Any = yaml.safe_load((files("eagle3.tokens") / "vectors.yaml").read_text(encoding="utf-8"))
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


def _check_boundary(grammar: ResponseGrammar, tokenizer: Tokenizer, mode: str, recorder: Recorder) -> None:
    """P9: the close of reasoning is one token, so that what stands before and after it cannot merge with it."""
    close = grammar.mode(mode).close
    if close is None:
        recorder.skip("P9", f"close of reasoning in mode {mode}", "this mode generates none")
        return
    advice = "A close that is ordinary text merges with its neighbours; this grammar schema cannot describe it."
    with recorder.check("P9", f"close of reasoning in mode {mode}", advice) as note:
        token = grammar.control[close]
        for before, after in (("x", "y"), ("so.\n", "\n\nIt"), ("3 ", " 4"), ("是", "好")):
            spliced = [*tokenizer.encode_ordinary(before), token.id, *tokenizer.encode_ordinary(after)]
            whole = f"{before}{token.text}{after}"
            require(tokenizer.decode(spliced) == whole, f"{whole!r} spliced decodes to {tokenizer.decode(spliced)!r}.")
            ordinary = tokenizer.encode_ordinary(whole)
            require(token.id not in ordinary, f"ordinary text {whole!r} holds the close id {token.id}.")
        note(f"{token.text!r} is the single token {token.id}")
