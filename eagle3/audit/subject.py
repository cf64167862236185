"""What rules look at: one sample with its prompt and reply, and what the target's grammar makes of token ids."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, product

from eagle3.errors import TokenizerError
from eagle3.records import (
    AuditFinding,
    Completion,
    Exactness,
    PromptRecord,
    Segment,
    SegmentKind,
    Severity,
    TokenSample,
)
from eagle3.tokens.grammar import Around, Mode, ResponseGrammar
from eagle3.tokens.raw_tools import RawSection, find_raw_section
from eagle3.tokens.tokenizer import Tokenizer

FINISHED = frozenset({"stop", "tool_calls"})
"""Finish reasons of an answer that the model ended itself."""
START_CHARS = 2
"""So many first characters tell nearly all texts from those of control tokens."""
TEXT_KINDS = (SegmentKind.REASONING, SegmentKind.CONTENT, SegmentKind.TOOL)


@dataclass(frozen=True)
class TokenRules:
    """What the target's grammar and tokenizer say about ids; built once per run."""

    grammar: ResponseGrammar
    tokenizer: Tokenizer
    mode_name: str
    keeps_literals: bool = False
    """Whether the recipe keeps prompts that hold the text of a control token."""

    @cached_property
    def mode(self) -> Mode:
        """How the model answers."""
        return self.grammar.mode(self.mode_name)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Every control id of the tokenizer, named by the grammar or not."""
        return frozenset(self.tokenizer.control_id(text) for text in self.tokenizer.control_literals)

    @cached_property
    def named_ids(self) -> frozenset[int]:
        """Control ids that the grammar names."""
        return frozenset(token.id for token in self.grammar.control.values())

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids that end an answer for any finish reason."""
        return frozenset(self.id_of(name) for names in self.grammar.end.values() for name in names)

    @cached_property
    def close_id(self) -> int | None:
        """Id that ends the reasoning; None when this mode generates none."""
        return None if self.mode.close is None else self.id_of(self.mode.close)

    @cached_property
    def kind_after(self) -> Mapping[int, SegmentKind]:
        """Which text follows a control id, where the grammar says so."""
        kinds: dict[int, SegmentKind] = {}
        if self.grammar.tools is not None:
            tools = self.grammar.tools
            kinds |= {self.id_of(part.token): SegmentKind.TOOL for part in (*tools.before, *tools.call) if part.token}
            kinds |= {self.id_of(part.token): SegmentKind.CONTENT for part in tools.after if part.token}
        if self.mode.reasoning is not None:
            opens = (part.token for part in self.mode.reasoning.before if part.token)
            kinds |= {self.id_of(token): SegmentKind.REASONING for token in opens}
        if self.close_id is not None:
            kinds[self.close_id] = SegmentKind.CONTENT
        return kinds

    @cached_property
    def opening_kind(self) -> SegmentKind:
        """What an answer starts with: reasoning where the prompt opens it."""
        opens_in_prompt = self.mode.reasoning is not None and not self.mode.reasoning.before
        return SegmentKind.REASONING if opens_in_prompt else SegmentKind.CONTENT

    @cached_property
    def padding(self) -> Sequence[tuple[bytes, bytes]]:
        """What the grammar may write directly before and after a text of the reply; may be nothing."""
        around = (self.mode.content, self.mode.reasoning or Around())
        parts = [part for entry in around for part in (*entry.before, *entry.after)]
        parts += self.grammar.tools.after_content if self.grammar.tools is not None else ()
        texts = {b"", *(part.text.encode() for part in parts if part.text is not None)}
        return list(product(texts, texts))

    @cached_property
    def control_literal(self) -> re.Pattern[str]:
        """Finds the text of any control token."""
        literals = sorted(self.tokenizer.control_literals, key=lambda literal: (-len(literal), literal))
        return re.compile("|".join(map(re.escape, literals)) or r"(?!)")

    @cached_property
    def literal_starts(self) -> Mapping[str, tuple[str, ...]]:
        """First character -> first characters of the texts of control tokens that begin so."""
        starts = sorted({literal[:START_CHARS] for literal in self.tokenizer.control_literals if literal})
        return {first: tuple(start for start in starts if start[0] == first) for first in {each[0] for each in starts}}

    def find_literal(self, text: str) -> str | None:
        """Return the first text of a control token inside a text."""
        for first, starts in self.literal_starts.items():
            place = text.find(first)
            while place >= 0:
                if text.startswith(starts, place):
                    found = self.control_literal.search(text)
                    return found.group() if found is not None else None
                place = text.find(first, place + 1)
        return None

    def id_of(self, name: str) -> int:
        """Return the id of a control token of the grammar."""
        return self.grammar.control[name].id

    def end_of(self, finish_reason: str) -> list[int]:
        """Return the ids that must end an answer with this finish reason."""
        return [self.id_of(name) for name in self.grammar.end.get(finish_reason, ())]

    @cached_property
    def tool_ids(self) -> frozenset[int]:
        """Control ids that occur in tool calls and nowhere else in an answer."""
        tools = self.grammar.tools
        if tools is None:
            return frozenset()
        modes = self.grammar.modes.values()
        around = [entry for mode in modes for entry in (mode.content, mode.reasoning) if entry is not None]
        elsewhere = {part.token for entry in around for part in (*entry.before, *entry.after)}
        parts = (*tools.before, *tools.call, *tools.between, *tools.after)
        return frozenset(self.id_of(part.token) for part in parts if part.token and part.token not in elsewhere)

    def tool_sequence(self, num_calls: int) -> list[int]:
        """Return the control ids of an answer's tool calls, in order."""
        tools = self.grammar.tools
        if tools is None or not num_calls:
            return []
        parts = [*tools.before, *tools.call, *[*tools.between, *tools.call] * (num_calls - 1), *tools.after]
        return [self.id_of(part.token) for part in parts if part.token is not None]

    @cached_property
    def fixed_text(self) -> re.Pattern[bytes]:
        """Matches what the grammar itself may write between control tokens."""
        around = (self.mode.content, self.mode.reasoning or Around())
        parts = chain.from_iterable((*entry.before, *entry.after) for entry in around)
        return re.compile(b"(?:" + b"|".join(re.escape((part.text or "").encode()) for part in parts) + b")*")


@dataclass(frozen=True, slots=True)
class Control:
    """One control id of a completion."""

    position: int
    """In the whole sample."""
    token_id: int
    kind: SegmentKind
    """Of the segment it stands in."""


@dataclass(slots=True)
class _Decoded:
    """What one look at all completion ids shows."""

    texts: dict[SegmentKind, bytes] = field(default_factory=dict[SegmentKind, bytes])
    fixed: list[bytes] = field(default_factory=list[bytes])
    controls: list[Control] = field(default_factory=list[Control])
    has_unknown_ids: bool = False

    def add(self, kind: SegmentKind, data: bytes) -> None:
        known = self.texts.get(kind)
        self.texts[kind] = data if known is None else known + data

    def add_odd(self, kind: SegmentKind, ids: Sequence[int], rules: TokenRules) -> None:
        """Add ids among which control ids or unknown ones may be."""
        try:
            data = rules.tokenizer.decode_bytes(ids)
        except TokenizerError:
            self.has_unknown_ids = True
            return
        if kind is SegmentKind.CONTROL:
            self.fixed.append(data)
        else:
            self.add(kind, data)

    def add_controls(self, segment: Segment, ids: Sequence[int], rules: TokenRules) -> None:
        for position, token_id in enumerate(ids, segment.start):
            if token_id in rules.control_ids:
                self.controls.append(Control(position, token_id, segment.kind))


@dataclass(frozen=True)
class Subject:
    """One sample under audit."""

    prompt: PromptRecord
    completion: Completion
    sample: TokenSample
    rules: TokenRules

    @cached_property
    def is_given(self) -> bool:
        """Whether the ids came from the server: then an oddity is the model's or the server's, not ours."""
        return self.sample.exactness is Exactness.EXACT_IDS

    @property
    def completion_ids(self) -> Sequence[int]:
        """What the model generated."""
        return self.sample.input_ids[self.sample.num_prompt_tokens :]

    @cached_property
    def completion_segments(self) -> Sequence[Segment]:
        """Segments after the prompt."""
        return [segment for segment in self.sample.segments if segment.kind is not SegmentKind.PROMPT]

    @cached_property
    def texts(self) -> Mapping[str, str]:
        """Every text of the reply, by where it stood."""
        texts = {"reasoning": self.completion.reasoning or "", "content": self.completion.content or ""}
        for index, call in enumerate(self.completion.tool_calls):
            texts[f"tool_calls[{index}].arguments"] = call.arguments
        return {place: text for place, text in texts.items() if text}

    @cached_property
    def texts_bytes(self) -> Mapping[str, bytes | None]:
        """The same in UTF-8; None for a text with half of a surrogate pair, which has no bytes."""
        return {place: _utf8(text) for place, text in self.texts.items()}

    @cached_property
    def parts(self) -> tuple[str, str]:
        """Reasoning and content of the reply, also when the server left both, or a tool section, in the content."""
        reasoning, content = self.completion.reasoning or "", self.completion.content or ""
        if self.raw_section is not None:
            content = content[: self.raw_section.start]
        rules = self.rules
        if not reasoning and rules.mode.close is not None and rules.close_id in self.control_id_set:
            before, literal, after = content.partition(rules.grammar.control[rules.mode.close].text)
            if literal:
                for part in (rules.mode.reasoning or Around()).before:
                    if part.token is not None:
                        before = before.removeprefix(rules.grammar.control[part.token].text)
                return before, after
        return reasoning, content

    @cached_property
    def parts_bytes(self) -> tuple[bytes | None, bytes | None]:
        """The same in UTF-8; None for a part with half of a surrogate pair."""
        (reasoning, content), texts = self.parts, self.texts_bytes
        return (
            texts.get("reasoning", b"") if reasoning is self.completion.reasoning else _utf8(reasoning),
            texts.get("content", b"") if content is self.completion.content else _utf8(content),
        )

    @cached_property
    def part_literals(self) -> tuple[str | None, str | None]:
        """The first text of a control token in reasoning and in content."""
        reasoning, content = self.parts
        return self.rules.find_literal(reasoning), self.rules.find_literal(content)

    def ids_of(self, segment: Segment) -> Sequence[int]:
        """Return the ids of a segment."""
        return self.sample.input_ids[segment.start : segment.stop]

    @property
    def is_rebuilt(self) -> bool:
        """Whether there are completion ids at all; without them only the count rule has something to say."""
        return len(self.sample.input_ids) > self.sample.num_prompt_tokens

    @cached_property
    def raw_section(self) -> RawSection | None:
        """The tool section that stands in the content and whose control tokens are among the ids."""
        grammar = self.rules.grammar
        if self.completion.tool_calls or not self.completion.content or grammar.tools is None:
            return None
        section = find_raw_section(self.completion.content, grammar, is_cut=True)
        opener = next(name for name, _ in section.parts if name is not None) if section is not None else None
        return section if opener is not None and self.rules.id_of(opener) in self.control_id_set else None

    @property
    def num_raw_calls(self) -> int:
        """How many calls the tool section in the content holds."""
        tools = self.rules.grammar.tools
        if self.raw_section is None or tools is None:
            return 0
        opener = next(part.token for part in tools.call if part.token is not None)
        return sum(name == opener for name, _ in self.raw_section.parts)

    @property
    def controls(self) -> Sequence[Control]:
        """Every control id of the completion, in order."""
        return self._decoded.controls

    @cached_property
    def control_id_set(self) -> frozenset[int]:
        """Which control ids the completion holds."""
        return frozenset(control.token_id for control in self.controls)

    @property
    def decoded(self) -> Mapping[SegmentKind, bytes] | None:
        """The bytes of each text, ambiguous stretches counted to the text they stand in; None when an id has none."""
        return None if self._decoded.has_unknown_ids else self._decoded.texts

    @property
    def fixed_texts(self) -> Sequence[bytes]:
        """Text between control tokens that the grammar itself puts there, such as the name of a channel."""
        return self._decoded.fixed

    @cached_property
    def _decoded(self) -> "_Decoded":
        """Look at every completion id once: text ids give their bytes, all others are looked at by name."""
        rules, result = self.rules, _Decoded()
        current = rules.opening_kind
        for segment in self.completion_segments:
            ids = self.ids_of(segment)
            if segment.kind in TEXT_KINDS:
                current = segment.kind
                try:
                    result.add(current, rules.tokenizer.decode_ordinary(ids))
                except TokenizerError:
                    result.add_controls(segment, ids, rules)
                    result.add_odd(current, ids, rules)
                continue
            result.add_controls(segment, ids, rules)
            is_fixed = segment.kind is SegmentKind.CONTROL
            for is_named, run in groupby(ids, key=rules.named_ids.__contains__):
                if not is_named:
                    result.add_odd(segment.kind if is_fixed else current, list(run), rules)
                    continue
                for token_id in run:
                    current = rules.kind_after.get(token_id, current)
        return result

    def finding(self, rule: str, severity: Severity, detail: str, position: int | None = None) -> AuditFinding:
        """Return a finding about this sample."""
        return AuditFinding(
            rule=rule,
            severity=severity,
            sample_id=self.sample.sample_id,
            detail=detail,
            provider=self.sample.provider,
            position=position,
        )

    def structural(self, rule: str, detail: str, position: int | None = None) -> AuditFinding:
        """Return a finding about the structure of ids.

        Critical for ids that we built: the mistake is in the grammar or in our code, and other samples have it too. An
        error for ids that the server gave: this one answer is odd, and dropping it is enough.
        """
        severity = Severity.ERROR if self.is_given else Severity.CRITICAL
        return self.finding(rule, severity, detail, position)


def _utf8(text: str) -> bytes | None:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None
