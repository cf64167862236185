"""What rules look at: one sample with its prompt and reply, and what the target's grammar makes of token ids."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
from eagle3.tokens.grammar import Mode, ResponseGrammar
from eagle3.tokens.raw_tools import RawSection, find_raw_section
from eagle3.tokens.tokenizer import Tokenizer

FINISHED = frozenset({"stop", "tool_calls"})
"""Finish reasons of an answer that the model ended itself."""
TEXT_KINDS = frozenset({SegmentKind.REASONING, SegmentKind.CONTENT, SegmentKind.TOOL})


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
    def control_literal(self) -> re.Pattern[str]:
        """Finds the text of any control token."""
        literals = sorted(self.tokenizer.control_literals, key=lambda literal: (-len(literal), literal))
        return re.compile("|".join(map(re.escape, literals)) or r"(?!)")

    @cached_property
    def literal_starts(self) -> frozenset[str]:
        """First characters of all texts of control tokens: text without any of them needs no search."""
        return frozenset(literal[0] for literal in self.tokenizer.control_literals if literal)

    def find_literal(self, text: str) -> str | None:
        """Return the first text of a control token inside a text."""
        if not any(start in text for start in self.literal_starts):
            return None
        found = self.control_literal.search(text)
        return found.group() if found is not None else None

    def id_of(self, name: str) -> int:
        """Return the id of a control token of the grammar."""
        return self.grammar.control[name].id

    def end_of(self, finish_reason: str) -> list[int]:
        """Return the ids that must end an answer with this finish reason."""
        return [self.id_of(name) for name in self.grammar.end.get(finish_reason, ())]

    def tool_token_counts(self, num_calls: int) -> dict[int, int]:
        """Return how often each control id of the tool grammar occurs in an answer with so many calls."""
        counts: dict[int, int] = {}
        tools = self.grammar.tools
        if tools is None:
            return counts
        times = [
            (tools.before, min(num_calls, 1)),
            (tools.call, num_calls),
            (tools.between, max(num_calls - 1, 0)),
            (tools.after, min(num_calls, 1)),
        ]
        for parts, count in times:
            for part in parts:
                if part.token is not None:
                    token_id = self.id_of(part.token)
                    counts[token_id] = counts.get(token_id, 0) + count
        return counts


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

    @cached_property
    def completion_ids(self) -> Sequence[int]:
        """What the model generated."""
        return self.sample.input_ids[self.sample.num_prompt_tokens :]

    @cached_property
    def completion_segments(self) -> Sequence[Segment]:
        """Segments after the prompt."""
        return [segment for segment in self.sample.segments if segment.kind is not SegmentKind.PROMPT]

    @property
    def texts(self) -> Mapping[str, str]:
        """Every text of the reply, by where it stood."""
        texts = {"reasoning": self.completion.reasoning or "", "content": self.completion.content or ""}
        for index, call in enumerate(self.completion.tool_calls):
            texts[f"tool_calls[{index}].arguments"] = call.arguments
        return {place: text for place, text in texts.items() if text}

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
        return section if opener is not None and self.rules.id_of(opener) in self.completion_ids else None

    @property
    def num_raw_calls(self) -> int:
        """How many calls the tool section in the content holds."""
        tools = self.rules.grammar.tools
        if self.raw_section is None or tools is None:
            return 0
        opener = next(part.token for part in tools.call if part.token is not None)
        return sum(name == opener for name, _ in self.raw_section.parts)

    @cached_property
    def spans(self) -> Sequence[tuple[SegmentKind, list[int]]]:
        """The ids of each text in order, ambiguous stretches counted to the text they stand in."""
        spans: list[tuple[SegmentKind, list[int]]] = []
        current = self.rules.opening_kind
        is_open = False

        def put(ids: Sequence[int]) -> None:
            if is_open and spans[-1][0] is current:
                spans[-1][1].extend(ids)
            else:
                spans.append((current, list(ids)))

        for segment in self.completion_segments:
            ids = self.ids_of(segment)
            if segment.kind not in (SegmentKind.CONTROL, SegmentKind.AMBIGUOUS):
                current = segment.kind
                put(ids)
                is_open = True
                continue
            for token_id in ids:
                if segment.kind is SegmentKind.CONTROL or token_id in self.rules.named_ids:
                    current = self.rules.kind_after.get(token_id, current)
                    is_open = False
                else:
                    put([token_id])
                    is_open = True
        return spans

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
