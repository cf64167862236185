"""Named checks of one family: grammar, tokenizer, configuration and template held against each other.

`load_tokenizer` refuses the first thing that is wrong; these checks look at everything and tell each result apart, for
people who write a grammar and for preflight. They need files only: no network, no weights.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from itertools import chain
from pathlib import Path

from eagle3.errors import TemplateError, TokenError
from eagle3.records import Completion, JsonObject, ToolCall, Usage
from eagle3.tokens.grammar import ResponseGrammar, load_grammar
from eagle3.tokens.layout import Habits, Shape, lay_out
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.tokenizer import (
    Tokenizer,
    check_end,
    check_size,
    control_mistakes,
    load_unchecked_tokenizer,
    read_json_file,
    read_vocabulary_file,
)

SAMPLE_TEXTS = (
    "Hello, world! Don't stop: 42, 3.14, 1e9.",
    "  two spaces,\ta tab\r\nand lines\n\n\n",
    "你好 世界 こんにちは 한국어 مرحبا",
    "👩‍👩‍👧 🇮🇹 👍🏽 é",
    '{"a": [1, 2.50, "x\\"y"], "b": {}}',
    "a\x00b\x1c \ufeff\u00a0\u2028\u3000 \ufffd",
)
ROUND_TRIPS = 200
_PIECES = ("word", " word", "\n", "  ", "7", "42", "你好", "é", ".", "\t", "{", '":', "'s", "🌍")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One named check."""

    name: str
    passed: bool | None
    """None when there is nothing to check."""
    expected: str
    found: str

    def to_json(self) -> JsonObject:
        """Return the check as small JSON."""
        return asdict(self)


def check_family(directory: Path, grammar: str | Path) -> list[Check]:
    """Run all checks; a check that others build on ends the list when it fails.

    Args:
        directory: Tokenizer files, and usually `config.json` and the chat template.
        grammar: Name of a packaged grammar, or a path to a YAML file.
    """
    checks: list[Check] = []
    loaded: list[ResponseGrammar] = []
    checks.append(_tried("grammar file", "a well-formed grammar", lambda: _loaded_grammar(grammar, loaded)))
    if not loaded:
        return checks
    family = loaded[0]
    pins = family.tokenizer.sha256
    expected = f"sha256 among {[pin[:12] + '…' for pin in pins]}" if pins else "a readable file (no digest pinned)"
    checks.append(_tried("vocabulary digest", expected, lambda: read_vocabulary_file(directory, family)[1][:12] + "…"))
    tokenizers: list[Tokenizer] = []

    def load() -> str:
        tokenizers.append(load_unchecked_tokenizer(directory, family))
        return f"{tokenizers[0].vocab_size} ids"

    checks.append(_tried("vocabulary loads", f"a {family.tokenizer.kind} vocabulary", load))
    if not tokenizers:
        return checks
    return [*checks, *_token_checks(directory, family, tokenizers[0]), *_mode_checks(directory, family, tokenizers[0])]


def _loaded_grammar(source: str | Path, into: list[ResponseGrammar]) -> str:
    into.append(load_grammar(source))
    return f"{into[0].name} version {into[0].version}"


def _token_checks(directory: Path, grammar: ResponseGrammar, tokenizer: Tokenizer) -> Iterator[Check]:
    size = grammar.tokenizer.vocab_size
    yield Check(
        name="vocabulary size",
        passed=tokenizer.vocab_size == size,
        expected=str(size),
        found=str(tokenizer.vocab_size),
    )
    yield _tried("model size", f"at least {size} ids", lambda: check_size(grammar, directory) or "not stated")
    for name, token in grammar.control.items():
        mistake = control_mistakes(tokenizer, name, token)
        wanted = f"{token.text!r} = {token.id}"
        yield Check(name=f"control {name}", passed=mistake is None, expected=wanted, found=mistake or wanted)
    yield _tried("end of answer", "an end id of the model configuration", lambda: check_end(grammar, directory))
    yield _unknown_name(tokenizer)
    control = {tokenizer.control_id(literal) for literal in tokenizer.control_literals}
    parsed = sorted(
        literal
        for literal in tokenizer.control_literals
        if control.intersection(tokenizer.encode_ordinary(f"say {literal}!"))
    )
    yield Check(
        name="literals in text stay ordinary",
        passed=not parsed,
        expected=f"no control id out of {len(control)} literals",
        found=f"control ids out of {parsed[:5]}" if parsed else "none",
    )
    lost = [text for text in _texts() if _changes(tokenizer, text)]
    yield Check(
        name="text comes back",
        passed=not lost,
        expected="the bytes of every text" + (" in NFC" if grammar.tokenizer.normalizer == "nfc" else ""),
        found=f"{len(lost)} texts changed, first {lost[0]!r}" if lost else "all",
    )


def _unknown_name(tokenizer: Tokenizer) -> Check:
    try:
        found = f"id {tokenizer.control_id('no such token')}"
    except TokenError:
        return Check(name="unknown names raise", passed=True, expected="an error", found="an error")
    return Check(name="unknown names raise", passed=False, expected="an error", found=found)


def _texts() -> list[str]:
    rng = random.Random(0)  # noqa: S311 - repeatable texts, no secret
    made = ["".join(rng.choice(_PIECES) for _ in range(rng.randint(1, 12))) for _ in range(ROUND_TRIPS)]
    return [*SAMPLE_TEXTS, *made]


def _changes(tokenizer: Tokenizer, text: str) -> bool:
    return tokenizer.decode_bytes(tokenizer.encode_ordinary(text)) != text.encode()


def _mode_checks(directory: Path, grammar: ResponseGrammar, tokenizer: Tokenizer) -> Iterator[Check]:
    user: JsonObject = {"role": "user", "content": "Hi"}
    has_template = (directory / "chat_template.jinja").is_file() or bool(
        read_json_file(directory / "tokenizer_config.json").get("chat_template")
    )
    if not has_template:
        wanted, found = "a chat template", "neither chat_template.jinja nor one in tokenizer_config.json"
        yield Check(name="prompts and answers by the template", passed=None, expected=wanted, found=found)
        return
    for name, mode in grammar.modes.items():
        renderers: list[PromptRenderer] = []

        def prompt(name: str = name, into: list[PromptRenderer] = renderers) -> str:
            renderer = PromptRenderer(directory, grammar, tokenizer, name)
            found = f"{len(renderer.render_ids([user]))} ids"
            into.append(renderer)
            return found

        yield _tried(f"prompt of mode {name}", f"ends with {mode.prompt_ends_with!r}", prompt)
        if not renderers:
            continue
        for case, answer, completion in _cases(grammar, name):
            yield _template_case(renderers[0], f"answer of mode {name}: {case}", answer, completion)


def _cases(grammar: ResponseGrammar, mode: str) -> Iterator[tuple[str, JsonObject, Completion]]:
    """Yield answers in the template's form and in ours."""
    reasoning = "Hm, 2." if grammar.mode(mode).reasoning is not None else None
    thought: JsonObject = {"reasoning_content": reasoning} if reasoning else {}
    yield "text", {"role": "assistant", **thought, "content": "Yes."}, _answer(reasoning, "Yes.", ())
    if grammar.tools is None:
        return
    for label, names in (("one call", ["f"]), ("two calls", ["f", "g"])):
        made = [
            ToolCall(id=f"functions.{name}:{index}", name=name, arguments='{"a": 1}')
            for index, name in enumerate(names)
        ]
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in made
        ]
        message = {"role": "assistant", **thought, "content": "Wait.", "tool_calls": calls}
        yield label, message, _answer(reasoning, "Wait.", made)


def _template_case(renderer: PromptRenderer, name: str, answer: JsonObject, completion: Completion) -> Check:
    """Render an answer as history and compare it with our own layout of the same answer.

    Templates write history by rules of their own; where one leaves a part of the answer out, nothing is compared.
    """
    grammar, tokenizer = renderer.grammar, renderer.tokenizer
    expected = f"{name.rpartition(': ')[2]} as the grammar lays it out"
    user: JsonObject = {"role": "user", "content": "Hi"}
    habits = Habits(padding="restored" if "restored" in grammar.variants.padding else "kept")
    try:
        pieces = lay_out(completion, grammar, renderer.mode, habits, Shape(), tokenizer.encode_ordinary)
        ours = list(chain.from_iterable(piece.ids for piece in pieces))
        prompt = renderer.render_ids([user])
        whole = renderer.render_ids([user, answer])
    except TokenError as exc:
        skipped = isinstance(exc, TemplateError)
        return Check(name=name, passed=None if skipped else False, expected=expected, found=str(exc))
    texts = [text for text in (completion.reasoning, completion.content) if text]
    if any(text not in tokenizer.decode(whole) for text in texts):
        return Check(name=name, passed=None, expected=expected, found="the template leaves a part of history out")
    found = whole[len(prompt) : len(prompt) + len(ours)]
    if whole[: len(prompt)] != prompt and grammar.mode(renderer.mode).reasoning is None:
        # The prompt closes a thinking that history leaves out; only the answer itself can be compared.
        found = ours if _holds(whole, ours) else whole[-len(ours) :]
    return Check(
        name=name,
        passed=found == ours,
        expected=repr(tokenizer.decode(ours)),
        found=repr(tokenizer.decode(found)) if found != ours else "the same ids",
    )


def _holds(ids: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(ids[start : start + len(part)]) == list(part) for start in range(len(ids) - len(part) + 1))


def _answer(reasoning: str | None, content: str, calls: Sequence[ToolCall]) -> Completion:
    return Completion(
        sample_id="check",
        dataset="check",
        reasoning=reasoning,
        content=content,
        tool_calls=tuple(calls),
        finish_reason="tool_calls" if calls else "stop",
        native_finish_reason=None,
        provider="check",
        model="check",
        quantization=None,
        generation_id=None,
        usage=Usage(prompt_tokens=0, completion_tokens=0),
        cost_usd=Decimal(0),
        cost_is_estimated=False,
        prompt_token_ids=None,
        completion_token_ids=None,
        latency_s=0.0,
        attempts=1,
        from_cache=False,
        raw_body=b"",
    )


def _tried(name: str, expected: str, work: Callable[[], str]) -> Check:
    try:
        return Check(name=name, passed=True, expected=expected, found=work())
    except TokenError as exc:
        return Check(name=name, passed=False, expected=expected, found=str(exc))
