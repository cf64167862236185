"""Rules about one sample. Each is a pure function from a subject to findings; `SAMPLE_RULES` is the registry.

`error` drops the sample; `critical` also fails the audit; `warning` and `info` are only counted. Ids that we built and
that break the grammar are critical, because the mistake is ours and is not alone; ids that the server gave are dropped
one by one (`Subject.structural`).
"""

import json
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any, TypeAlias, cast

import pyarrow as pa

from eagle3.audit.subject import FINISHED, TEXT_KINDS, Subject
from eagle3.records import AuditFinding, Exactness, SegmentKind, Severity, strings_of
from eagle3.tokens.grammar import Around, Variants

SampleRule: TypeAlias = Callable[[Subject], Iterator[AuditFinding]]

CUT = "length"
MAX_RUN_CHARS = 25_000
"""Longer runs of one character class are cut by some servers' tokenizers and not by others."""
MAX_TEXT_CHARS = 400_000
LOOP_MIN_BYTES = 256
LOOP_COMPRESSION_RATIO = 8.0
"""zlib shrinks prose and code to a half or a fifth; a loop of one sentence shrinks to a tenth and less."""
LOOP_MIN_LZ4_RATIO = 3.0
"""What zlib shrinks to an eighth by repetition, LZ4 shrinks to a third at a seventh of the cost: it finds the same
repetitions, and only spells the rest at greater length."""
MIN_REPEATED_CHARS = 20
"""Shorter reasoning may well be repeated in the answer by chance."""
_SPACING = re.compile(r"\s+")
_LZ4: Any = pa.Codec("lz4_raw")


def end_token(subject: Subject) -> Iterator[AuditFinding]:
    """A01: the end of the answer stands once, last, exactly when the finish reason says that the model ended."""
    reason, ids = subject.completion.finish_reason, subject.sample.input_ids
    expected = subject.rules.end_of(reason)
    last = max(len(ids) - len(expected), subject.sample.num_prompt_tokens)
    found = list(ids[last:]) if expected else []
    if found != expected:
        yield subject.structural("A01", f"finish reason {reason!r} must end with {expected}, found {found}")
        return
    for each in subject.controls:
        if each.token_id in subject.rules.end_ids and each.position < last:
            detail = f"end id {each.token_id} before the end (finish reason {reason!r})"
            yield subject.structural("A01", detail, each.position)
            return


def close_token(subject: Subject) -> Iterator[AuditFinding]:
    """A02: reasoning is closed exactly once and in its place, where the mode has reasoning at all."""
    rules = subject.rules
    if rules.close_id is None:
        closers = {rules.id_of(mode.close) for mode in rules.grammar.modes.values() if mode.close is not None}
        if not closers.isdisjoint(subject.control_id_set):
            yield subject.structural("A02", f"mode {rules.mode_name!r} closes no reasoning, found a close token")
        return
    found = [each.position for each in subject.controls if each.token_id == rules.close_id]
    kinds = [segment.kind for segment in subject.completion_segments]
    if not found:
        has_content = SegmentKind.CONTENT in kinds
        has_reasoning = SegmentKind.REASONING in kinds
        may_skip = rules.mode.reasoning is not None and bool(rules.mode.reasoning.before) and not has_reasoning
        is_implicit = (
            SegmentKind.TOOL in kinds and rules.grammar.tools is not None and rules.grammar.tools.implicit_close
        )
        is_cut = subject.completion.finish_reason not in FINISHED
        if has_content and not may_skip:
            yield subject.structural("A02", "content without a close of reasoning before it")
        elif not has_content and not (may_skip or is_implicit or is_cut):
            yield subject.structural("A02", "the answer ended, but its reasoning was never closed")
        return
    if len(found) > 1:
        yield subject.structural("A02", f"expected one close of reasoning, found {len(found)}")
        return
    place = found[0]
    for segment in subject.completion_segments:
        is_before = segment.stop <= place
        if (is_before and segment.kind in (SegmentKind.CONTENT, SegmentKind.TOOL)) or (
            segment.start > place and segment.kind is SegmentKind.REASONING
        ):
            side = "before" if is_before else "after"
            yield subject.structural("A02", f"{segment.kind.value} stands {side} the close of reasoning", segment.start)
            return


def ids_in_place(subject: Subject) -> Iterator[AuditFinding]:
    """A03: control ids stand outside of texts, ids are in the vocabulary, no unnamed control id was generated."""
    rules, ids = subject.rules, subject.sample.input_ids
    # Every completion id is looked at when it is decoded; those of the prompt are not.
    looked_at = ids if subject.decoded is None else ids[: subject.sample.num_prompt_tokens]
    if looked_at and not 0 <= min(looked_at) <= max(looked_at) < rules.tokenizer.vocab_size:
        position = next(place for place, each in enumerate(ids) if not 0 <= each < rules.tokenizer.vocab_size)
        yield subject.structural("A03", f"id {ids[position]} is outside of [0, {rules.tokenizer.vocab_size})", position)
        return
    for each in subject.controls:
        if each.kind in TEXT_KINDS:
            detail = f"control id {each.token_id} inside {each.kind.value}"
        elif each.token_id not in rules.named_ids:
            detail = f"control id {each.token_id}, which the grammar does not name"
        else:
            continue
        yield subject.structural("A03", detail, each.position)
        return


def text_agrees(subject: Subject) -> Iterator[AuditFinding]:
    """A04: ids decode to the text of the reply, after the edits that the grammar declares and no others."""
    decoded = subject.decoded
    if decoded is None:
        return  # an id outside of the vocabulary is rule A03's
    kinds = SegmentKind.REASONING, SegmentKind.CONTENT
    for kind, text, core in zip(kinds, subject.parts, subject.parts_bytes, strict=True):
        found = decoded.get(kind, b"")
        if not _matches(found, text, core, subject):
            said = _excerpt(text.encode(errors="replace"))
            detail = f"{kind.value}: ids decode to {_excerpt(found)}, the reply says {said}"
            if subject.is_given:
                yield subject.finding("A04", Severity.WARNING, detail)
            else:
                yield subject.structural("A04", detail)
            return
    odd = next((text for text in subject.fixed_texts if not subject.rules.fixed_text.fullmatch(text)), None)
    if odd is not None:
        yield subject.structural("A04", f"{_excerpt(odd)} stands between control tokens, the grammar puts no such text")
        return
    if not subject.completion.tool_calls or subject.is_given:
        return
    tool_text = _SPACING.sub("", decoded.get(SegmentKind.TOOL, b"").decode(errors="replace"))
    for index, call in enumerate(subject.completion.tool_calls):
        if _SPACING.sub("", call.arguments) not in tool_text:
            yield subject.structural("A04", f"tool_calls[{index}]: its arguments are not what the ids decode to")
            return


def _matches(found: bytes, text: str, core: bytes | None, subject: Subject) -> bool:
    if subject.is_given:
        return found.decode(errors="replace").strip() == text.strip()
    form = subject.rules.grammar.tokenizer.normalizer
    if form != "none":
        found = unicodedata.normalize("NFC", found.decode(errors="replace")).encode()
        text = unicodedata.normalize("NFC", text)
        core = text.encode() if core is not None else None
    if core is None:
        return True  # a lone surrogate is rule A10's
    padding = subject.rules.padding
    for wanted in _unspaced(core, subject.rules.grammar.variants):
        if found == wanted:
            return True
        surplus = len(found) - len(wanted)
        if any(found == before + wanted + after for before, after in padding if len(before) + len(after) == surplus):
            return True
    # Parts of a mode that wrote nothing (no reply text, only padding or nothing at all).
    return not text.strip() and not found.strip()


def _unspaced(text: bytes, variants: Variants) -> Iterator[bytes]:
    """Yield a text as it is and without the one space that a detokenizer may have put at either edge."""
    head = text.removeprefix(b" ") if "strip" in variants.head_space else text
    yield text
    if head is not text:
        yield head
    if text.endswith(b" ") and any(value != "keep" for value in variants.tail_space):
        yield text[:-1]
        yield head[:-1]


def _lz4_size(data: bytes) -> int:
    return cast("int", _LZ4.compress(data).size)


def _excerpt(data: bytes) -> str:
    text = data.decode(errors="replace")
    return repr(text) if len(text) <= 40 else f"{text[:18]!r} … {text[-18:]!r} ({len(text)} characters)"


def count_agrees(subject: Subject) -> Iterator[AuditFinding]:
    """A05: as many ids as were billed under the provider's profile."""
    if not subject.is_rebuilt:
        yield subject.finding("A05", Severity.ERROR, "the reply could not be turned into ids")
    elif subject.sample.exactness is Exactness.MISMATCH:
        billed = subject.completion.usage.completion_tokens
        yield subject.finding("A05", Severity.ERROR, f"rebuilt minus billed is {subject.sample.delta}, billed {billed}")


def prompt_count_agrees(subject: Subject) -> Iterator[AuditFinding]:
    """A08: as many prompt ids as were billed. Zero means that nothing was reported, as for replies from the cache."""
    billed, rendered = subject.completion.usage.prompt_tokens, subject.sample.num_prompt_tokens
    if billed > 0 and billed != rendered:
        yield subject.finding("A08", Severity.ERROR, f"prompt: {rendered} ids rendered, {billed} billed")


def damaged_text(subject: Subject) -> Iterator[AuditFinding]:
    """A10: no replacement character, no lone surrogate; a NUL is only counted."""
    for place, text in subject.texts.items():
        if subject.texts_bytes[place] is None or "\ufffd" in text:
            yield subject.finding("A10", Severity.ERROR, f"{place}: holds U+FFFD or half of a surrogate pair")
        elif "\0" in text:
            yield subject.finding("A10", Severity.WARNING, f"{place}: holds NUL")


def control_literal(subject: Subject) -> Iterator[AuditFinding]:
    """A11: no text of a control token in the reply: the server missed it, or the model wrote about it."""
    if subject.is_given:
        return
    for place, found in zip(("reasoning", "content"), subject.part_literals, strict=True):
        if found is not None:
            yield subject.finding("A11", Severity.ERROR, f"{place}: holds the text {found!r} of a control token")


def tool_section(subject: Subject) -> Iterator[AuditFinding]:
    """A12: tool calls are whole: token counts, declared names, arguments that are an object."""
    calls = subject.completion.tool_calls
    declared = {str(_function_of(tool).get("name")) for tool in subject.prompt.tools}
    tools = subject.rules.grammar.tools
    id_form = tools.call_id if tools is not None and not subject.is_given else None
    for index, call in enumerate(calls):
        if id_form is not None and re.fullmatch(id_form, call.id) is None:
            detail = f"tool_calls[{index}]: id {call.id!r} is none that this model writes: the server put it there"
            yield subject.finding("A12", Severity.ERROR, detail)
        if call.name not in declared:
            yield subject.finding("A12", Severity.ERROR, f"tool_calls[{index}]: {call.name!r} was not declared")
        try:
            arguments: object = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            yield subject.finding("A12", Severity.ERROR, f"tool_calls[{index}]: arguments are no JSON object")
    if subject.completion.finish_reason == CUT:
        return
    rules, num_calls = subject.rules, len(calls) or subject.num_raw_calls
    found = [each.token_id for each in subject.controls]
    num_ends = len(rules.end_of(subject.completion.finish_reason))
    found = found[: len(found) - num_ends]
    expected = rules.tool_sequence(num_calls)
    split = len(found) - len(expected)
    if found[max(split, 0) :] != expected or not rules.tool_ids.isdisjoint(found[: max(split, 0)]):
        ours = [token_id for token_id in found if token_id in rules.tool_ids]
        detail = f"{num_calls} calls need the control ids {expected[:12]} last, found {ours[:12]}"
        yield subject.structural("A12", detail)


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: object = tool.get("function")
    return cast("Mapping[str, Any]", function) if isinstance(function, dict) else tool


def empty_answer(subject: Subject) -> Iterator[AuditFinding]:
    """A13: an ended answer says something, and a thinking mode thinks."""
    completion = subject.completion
    reasoning, content = subject.parts
    if completion.finish_reason in FINISHED and not content.strip() and not completion.tool_calls:
        yield subject.finding("A13", Severity.WARNING, "the answer ended without content and without tool calls")
    if subject.rules.close_id is not None and not reasoning.strip():
        yield subject.finding("A13", Severity.WARNING, "no reasoning in a mode that thinks")


def cut_answer(subject: Subject) -> Iterator[AuditFinding]:
    """A14: an answer cut by length is kept without its end, unless a tool call was cut; other endings are dropped."""
    reason = subject.completion.finish_reason
    has_tools = bool(subject.completion.tool_calls) or not subject.rules.tool_ids.isdisjoint(subject.control_id_set)
    if reason == CUT and has_tools:
        yield subject.finding("A14", Severity.ERROR, "cut by length inside or after a tool call")
    elif reason == CUT:
        yield subject.finding("A14", Severity.WARNING, "cut by length")
    elif reason not in FINISHED:
        yield subject.finding("A14", Severity.ERROR, f"ended by {reason!r}: not the model's own end")


def long_runs(subject: Subject) -> Iterator[AuditFinding]:
    """A15: no text so long, or so monotonous, that tokenizers cut it differently."""
    for place, text in subject.texts.items():
        if len(text) > MAX_TEXT_CHARS:
            yield subject.finding(
                "A15", Severity.WARNING, f"{place}: {len(text)} characters, more than {MAX_TEXT_CHARS}"
            )
        elif len(text) > MAX_RUN_CHARS:
            longest = max(sum(1 for _ in run) for _, run in groupby(text, key=str.isspace))
            if longest > MAX_RUN_CHARS:
                yield subject.finding("A15", Severity.WARNING, f"{place}: a run of {longest} characters of one class")


def mixed_up_reasoning(subject: Subject) -> Iterator[AuditFinding]:
    """A16: reasoning stands where it belongs: not again in the content, no marker left in either text."""
    mode = subject.rules.mode
    if mode.close is None:
        return
    control = subject.rules.grammar.control
    reasoning, content = subject.parts
    bare = reasoning.strip()
    # Its beginning first: most answers do not hold that either.
    if len(bare) >= MIN_REPEATED_CHARS and bare[:MIN_REPEATED_CHARS] in content and bare in content:
        yield subject.finding("A16", Severity.ERROR, "the reasoning stands in the content again")
    if subject.part_literals[0] is not None and control[mode.close].text in reasoning:
        yield subject.finding(
            "A16", Severity.ERROR, "a close of reasoning inside the reasoning: content is in there too"
        )
    opener = subject.rules.mode.prompt_ends_with
    names = [part.token for part in (mode.reasoning or Around()).before if part.token is not None]
    openers = [control[name].text for name in names] or [
        token.text for token in control.values() if opener.endswith(token.text)
    ]
    if any(content.lstrip().startswith(text) for text in openers):
        yield subject.finding("A16", Severity.ERROR, "the content starts with an open of reasoning")


def not_normalised(subject: Subject) -> Iterator[AuditFinding]:
    """A17: text that the tokenizer would rewrite cannot be rebuilt."""
    if subject.rules.grammar.tokenizer.normalizer != "nfc" or subject.is_given:
        return
    for place, text in subject.texts.items():
        if not unicodedata.is_normalized("NFC", text):
            yield subject.finding("A17", Severity.ERROR, f"{place}: not in the normal form NFC")


def repetition(subject: Subject) -> Iterator[AuditFinding]:
    """A18: the model is not caught in a loop."""
    for place, encoded in subject.texts_bytes.items():
        data = encoded if encoded is not None else subject.texts[place].encode(errors="replace")
        if len(data) < LOOP_MIN_BYTES or len(data) < LOOP_MIN_LZ4_RATIO * _lz4_size(data):
            continue
        ratio = len(data) / len(zlib.compress(data, 1))
        if ratio > LOOP_COMPRESSION_RATIO:
            yield subject.finding("A18", Severity.WARNING, f"{place}: compresses {ratio:.0f} to 1, it repeats itself")


def literal_in_prompt(subject: Subject) -> Iterator[AuditFinding]:
    """A21: the prompt holds no text of a control token, which the server would have read as the token.

    Such prompts are dropped before anything is spent, unless the recipe keeps them on purpose.
    """
    texts = strings_of([*subject.prompt.messages, *subject.prompt.tools])
    found = next(filter(None, map(subject.rules.find_literal, texts)), None)
    if found is not None:
        severity = Severity.WARNING if subject.rules.keeps_literals else Severity.ERROR
        yield subject.finding("A21", severity, f"the prompt holds the text {found!r} of a control token")


SAMPLE_RULES: Mapping[str, SampleRule] = {
    "A01": end_token,
    "A02": close_token,
    "A03": ids_in_place,
    "A04": text_agrees,
    "A05": count_agrees,
    "A08": prompt_count_agrees,
    "A10": damaged_text,
    "A11": control_literal,
    "A12": tool_section,
    "A13": empty_answer,
    "A14": cut_answer,
    "A15": long_runs,
    "A16": mixed_up_reasoning,
    "A17": not_normalised,
    "A18": repetition,
    "A21": literal_in_prompt,
}


def audit_sample(subject: Subject) -> list[AuditFinding]:
    """Return what all rules about one sample find."""
    if not subject.is_rebuilt:
        return list(count_agrees(subject))
    return [finding for rule in SAMPLE_RULES.values() for finding in rule(subject)]
