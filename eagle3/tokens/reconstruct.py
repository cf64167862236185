"""One completion to token ids, with a grade that says how surely they are the model's own.

Pure: no file, no clock, no network, so that a new grammar or profile re-derives everything from stored replies.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from eagle3.errors import TokenError
from eagle3.records import AuditFinding, Completion, Exactness, Segment, SegmentKind, Severity, TokenSample
from eagle3.tokens.grammar import ResponseGrammar
from eagle3.tokens.layout import Bill, Close, Habits, Piece, Shape, billed_count, lay_out, shapes_of, text_keys
from eagle3.tokens.logprobs import respelled
from eagle3.tokens.profiles import AXES, BILLING_AXES, CachedEncoder, ProviderProfile
from eagle3.tokens.tokenizer import Tokenizer

MAX_VARIANTS = 64
"""Most spellings of one answer that are tried; more would fit some count by chance."""
RESYNC_RUN = 4
"""Equal ids in a row after which two spellings count as together again."""
RESYNC_WINDOW = 32
"""Most ids skipped, in both together, to get there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconstruction:
    """A token sample and what was noticed on the way."""

    sample: TokenSample
    alternatives: int
    """Further id sequences that fit the evidence as well as the chosen one."""
    findings: tuple[AuditFinding, ...] = ()


@dataclass(frozen=True, slots=True)
class _Spelling:
    pieces: tuple[Piece, ...]
    ids: tuple[int, ...]
    bill: Bill


class _Variant(NamedTuple):
    habits: Habits
    shape: Shape
    pieces: tuple[Piece, ...]
    ids: tuple[int, ...]
    """One object for all spellings of one answer with the same ids."""
    delta: int


def reconstruct(
    completion: Completion,
    prompt_ids: Sequence[int],
    grammar: ResponseGrammar,
    tokenizer: Tokenizer,
    profile: ProviderProfile,
    *,
    mode: str,
    use_server_ids: bool = True,
    tools_declared: bool = False,
) -> Reconstruction:
    """Rebuild the token ids the target model produced for one completion.

    Native ids are taken when the server gave them, else those that logprobs name byte for byte. Otherwise the answer is
    laid out under the provider's profile and held against the billed count; if that does not fit, the spellings the
    profile leaves open are tried. One that fits alone is taken; of several, the tokens in which they differ are marked
    ambiguous and carry no loss.

    Args:
        completion: As returned by a provider; texts untouched, tool arguments as the model spelled them.
        prompt_ids: The rendered prompt, as the target's template gives it.
        grammar: Of the target's family.
        tokenizer: Of the target.
        profile: What this provider does to the text between the model and us.
        mode: Mode in which the answer was asked for.
        use_server_ids: Take native ids when there are any.
        tools_declared: Whether the request declared tools, so that the server has taken calls out of the text.

    Returns:
        A sample whose `input_ids` are prompt then completion, end token included when the model wrote one. Count
        mismatches are returned, graded as such, not raised.

    Raises:
        ReconstructionError: The reply holds something the grammar has no place for.
        TokenizerError: A text cannot be encoded.
    """
    if use_server_ids and completion.completion_token_ids:
        return _from_server(completion, prompt_ids, grammar, tokenizer, profile, mode)
    findings: list[AuditFinding] = []
    shapes = shapes_of(completion, grammar, mode, tools_declared=tools_declared)
    if use_server_ids and completion.token_bytes:
        named = _from_logprobs(completion, prompt_ids, grammar, tokenizer, profile, mode, shapes)
        if named is not None:
            return named
        findings.append(
            _finding(completion, "logprobs", Severity.INFO, "the tokens of the logprobs are not the answer's")
        )
    chosen, rivals, exactness = _choose(completion, grammar, tokenizer, profile, mode, shapes)
    masked = frozenset[int]().union(*(differing_positions(chosen.ids, rival.ids) for rival in rivals))
    if masked:
        masked |= _end_after_uncertain(chosen.pieces, masked)
    is_usual = (chosen.habits, chosen.shape) == (profile.habits, shapes[0])
    if exactness is Exactness.COUNT_REPAIRED and not is_usual:
        findings.append(_finding(completion, "variant", Severity.INFO, _describe(chosen)))
    sample = _sample(
        completion,
        prompt_ids,
        chosen.pieces,
        masked,
        exactness,
        delta=None if exactness is Exactness.UNVERIFIED else chosen.delta,
        ids=chosen.ids,
    )
    return Reconstruction(sample=sample, alternatives=len(rivals), findings=tuple(findings))


def unrebuilt(completion: Completion, prompt_ids: Sequence[int], reason: str) -> Reconstruction:
    """Return the record of a completion that cannot be rebuilt: the prompt alone, graded as a mismatch."""
    sample = _sample(completion, prompt_ids, (), frozenset(), Exactness.MISMATCH, delta=None)
    finding = _finding(completion, "not-rebuilt", Severity.ERROR, reason)
    return Reconstruction(sample=sample, alternatives=0, findings=(finding,))


def _choose(
    completion: Completion,
    grammar: ResponseGrammar,
    tokenizer: Tokenizer,
    profile: ProviderProfile,
    mode: str,
    shapes: Sequence[Shape],
) -> tuple[_Variant, list[_Variant], Exactness]:
    """Return the variant to take, the others that fit as well, and the grade."""
    encode = CachedEncoder(tokenizer)
    keys = [(number, shape, text_keys(completion, shape)) for number, shape in enumerate(shapes)]
    known: dict[object, _Spelling] = {}
    by_ids: list[_Spelling] = []

    def spelled(habits: Habits, shape: Shape) -> _Spelling:
        pieces = tuple(lay_out(completion, grammar, mode, habits, shape, encode))
        ids = _ids(pieces)
        # Two spellings of the same ids are one, so that variants are compared by identity.
        same = next((other for other in by_ids if other.ids == ids), None)
        made = _Spelling(pieces, same.ids if same is not None else ids, Bill.of(pieces, grammar, mode))
        if same is None:
            by_ids.append(made)
        return made

    def variants(habits: Iterable[Habits]) -> list[_Variant]:
        found: list[_Variant] = []
        for entry in habits:
            for number, shape, key_of in keys:
                key = number, key_of(entry)
                spelling = known.get(key)
                if spelling is None:
                    if len(known) >= MAX_VARIANTS:
                        continue
                    spelling = known[key] = spelled(entry, shape)
                delta = spelling.bill.count(entry) - billed
                found.append(_Variant(entry, shape, spelling.pieces, spelling.ids, delta))
        return found

    billed = completion.usage.completion_tokens
    open_habits = [profile.habits, *profile.rivals]
    best = variants([profile.habits])[0]
    if billed <= 0:
        return best, [], Exactness.UNVERIFIED
    if best.delta == 0:
        # Most answers have one spelling whatever is open, and then nothing is left to compare.
        others = [variant for variant in variants(open_habits) if variant.ids is not best.ids]
        rivals = _distinct([variant for variant in others if variant.delta == 0], known=best)
        if rivals:
            return best, rivals, Exactness.COUNT_AMBIGUOUS
        needs_no_axis = all(variant.shape is not best.shape for variant in others)
        if needs_no_axis and profile.billing_is_identified:
            return best, [], Exactness.COUNT_VERIFIED
        return best, [], Exactness.COUNT_REPAIRED
    # An answer that does not fit is an anomaly, unless what its fields or the provider's habit leave open explains it.
    # Rival habits are not tried: they explain fewer answers, and one of so many would fit by chance.
    search = [profile.habits]
    if profile.habits.args_style != "verbatim":
        search += [replace(profile.habits, args_style=style) for style in grammar.variants.args_style]
    hits = [variant for variant in variants(search) if variant.delta == 0]
    if not hits:
        return best, [], Exactness.MISMATCH
    # What a rival habit explains as well makes it ambiguous all the same.
    fitting = [variant for variant in variants(open_habits) if variant.delta == 0]
    rivals = _distinct([*hits[1:], *fitting], known=hits[0])
    return hits[0], rivals, Exactness.COUNT_AMBIGUOUS if rivals else Exactness.COUNT_REPAIRED


def _from_server(
    completion: Completion,
    prompt_ids: Sequence[int],
    grammar: ResponseGrammar,
    tokenizer: Tokenizer,
    profile: ProviderProfile,
    mode: str,
) -> Reconstruction:
    """Take native ids, and note where they differ from what text alone would have given."""
    findings: list[AuditFinding] = []
    ids = list(completion.completion_token_ids or ())
    prompt = list(prompt_ids)
    if completion.prompt_token_ids is not None and list(completion.prompt_token_ids) != prompt:
        prompt = list(completion.prompt_token_ids)
        detail = f"the server was asked with {len(prompt)} prompt ids, the template gives {len(prompt_ids)} or others"
        findings.append(_finding(completion, "server-prompt", Severity.WARNING, detail))
    end = [grammar.control[name].id for name in grammar.end.get(completion.finish_reason, ())]
    if end and ids[-len(end) :] != end:
        if completion.usage.completion_tokens == len(ids) + len(end):
            ids += end
            detail = "the server left out the end id it billed; it was put back"
        else:
            detail = f"finish reason {completion.finish_reason!r} without the end ids {end}"
        findings.append(_finding(completion, "server-end", Severity.WARNING, detail))
    pieces = segment_ids(ids, grammar, mode)
    try:
        shapes = shapes_of(completion, grammar, mode)
        canonical, _, grade = _choose(completion, grammar, tokenizer, profile, mode, shapes)
    except TokenError as exc:
        # Its ids are known all the same.
        findings.append(_finding(completion, "drift", Severity.WARNING, f"the text cannot be laid out: {exc}"))
    else:
        if list(canonical.ids) != ids:
            place = next(_differences(canonical.ids, ids), min(len(canonical.ids), len(ids)))
            seen = "shows" if grade is Exactness.MISMATCH else "does not show"
            detail = f"the ids are not the usual encoding of the text, first at {place}; the billed count {seen} it"
            findings.append(_finding(completion, "drift", Severity.INFO, detail, position=len(prompt) + place))
    billed = completion.usage.completion_tokens
    delta = billed_count(pieces, grammar, mode, profile.habits) - billed if billed > 0 else None
    sample = _sample(completion, prompt, pieces, frozenset(), Exactness.EXACT_IDS, delta=delta)
    return Reconstruction(sample=sample, alternatives=0, findings=tuple(findings))


def _from_logprobs(
    completion: Completion,
    prompt_ids: Sequence[int],
    grammar: ResponseGrammar,
    tokenizer: Tokenizer,
    profile: ProviderProfile,
    mode: str,
    shapes: Sequence[Shape],
) -> Reconstruction | None:
    """Take the ids that logprobs name, when they cover the whole answer and the billed count does not contradict."""
    billed = completion.usage.completion_tokens
    for habits in (profile.habits, *profile.rivals):
        for shape in shapes:
            laid = lay_out(completion, grammar, mode, habits, shape, tokenizer.encode_ordinary)
            spelled = respelled(laid, completion.token_bytes or (), tokenizer)
            if spelled is None:
                continue
            delta = billed_count(spelled.pieces, grammar, mode, habits) - billed if billed > 0 else None
            if not delta:
                exactness, findings = Exactness.EXACT_LOGPROBS, ()
                if spelled.num_encoded:
                    exactness = Exactness.UNVERIFIED if delta is None else Exactness.COUNT_REPAIRED
                    detail = f"{spelled.num_encoded} tokens came without bytes of their own and were encoded anew"
                    findings = (_finding(completion, "logprobs", Severity.INFO, detail),)
                sample = _sample(completion, prompt_ids, spelled.pieces, frozenset(), exactness, delta=delta)
                return Reconstruction(sample=sample, alternatives=0, findings=findings)
    return None


def segment_ids(ids: Sequence[int], grammar: ResponseGrammar, mode_name: str) -> tuple[Piece, ...]:
    """Cut native completion ids at the control tokens and say what lies between them."""
    mode, tools = grammar.mode(mode_name), grammar.tools
    names = {token.id: name for name, token in grammar.control.items()}
    after: dict[str, set[SegmentKind]] = {}

    def leads_to(kind: SegmentKind, tokens: Iterable[str | None]) -> None:
        for token in tokens:
            if token is not None:
                after.setdefault(token, set()).add(kind)

    if mode.reasoning is not None:
        leads_to(SegmentKind.REASONING, (part.token for part in mode.reasoning.before))
        leads_to(SegmentKind.CONTENT, [mode.close])
    leads_to(SegmentKind.CONTENT, (part.token for part in mode.content.before))
    if tools is not None:
        closing = tools.after or tools.call[-1:]
        inside = [*tools.before, *(part for part in tools.call if part not in closing)]
        leads_to(SegmentKind.TOOL, (part.token for part in inside))
        leads_to(SegmentKind.CONTENT, (part.token for part in closing))
    opens_in_prompt = mode.reasoning is not None and not mode.reasoning.before
    kind = SegmentKind.REASONING if opens_in_prompt else SegmentKind.CONTENT
    pieces: list[Piece] = []
    text: list[int] = []
    for token_id in ids:
        name = names.get(token_id)
        if name is None:
            text.append(token_id)
            continue
        if text:
            pieces.append(Piece(kind=kind, ids=tuple(text)))
            text = []
        pieces.append(Piece(kind=SegmentKind.CONTROL, ids=(token_id,), token=name))
        # A token that leads to several kinds (channels) says nothing by itself.
        if len(after.get(name, ())) == 1:
            (kind,) = after[name]
    if text:
        pieces.append(Piece(kind=kind, ids=tuple(text)))
    return tuple(pieces)


def differing_positions(chosen: Sequence[int], rival: Sequence[int]) -> frozenset[int]:
    """Return the positions of the chosen ids whose token is not certain, given a rival spelling.

    Both are walked side by side. Where they differ, the nearest places are sought from which they agree again for
    `RESYNC_RUN` ids or to their ends; what the chosen ids have before that is uncertain. Where only the rival has
    something more, the token that follows the gap is. Linear in the length.
    """
    positions: set[int] = set()
    mine = other = 0
    while mine < len(chosen) and other < len(rival):
        if chosen[mine] == rival[other]:
            mine += 1
            other += 1
            continue
        for skip in range(1, RESYNC_WINDOW):
            steps = [(ahead, skip - ahead) for ahead in range(skip + 1)]
            found = next((step for step in steps if _agree(chosen, mine + step[0], rival, other + step[1])), None)
            if found is not None:
                break
        else:
            return frozenset(positions | set(range(mine, len(chosen))))
        positions.update(range(mine, min(mine + max(found[0], 1), len(chosen))))
        mine += found[0]
        other += found[1]
    return frozenset(positions | set(range(mine, len(chosen))))


def _end_after_uncertain(pieces: Sequence[Piece], masked: frozenset[int]) -> frozenset[int]:
    """Return the positions of the closing control tokens when the id before them is uncertain.

    What the model ends its answer after is then not known, and that is what the end is learned from.
    """
    stop = sum(len(piece.ids) for piece in pieces)
    start = stop
    for piece in reversed(pieces):
        if piece.token is None:
            break
        start -= len(piece.ids)
    return frozenset(range(start, stop)) if start - 1 in masked else frozenset()


def _agree(chosen: Sequence[int], mine: int, rival: Sequence[int], other: int) -> bool:
    return chosen[mine : mine + RESYNC_RUN] == rival[other : other + RESYNC_RUN]


def _sample(
    completion: Completion,
    prompt_ids: Sequence[int],
    pieces: Sequence[Piece],
    masked: frozenset[int],
    exactness: Exactness,
    *,
    delta: int | None,
    ids: tuple[int, ...] | None = None,
) -> TokenSample:
    runs = [(SegmentKind.PROMPT, len(prompt_ids)), *[(piece.kind, len(piece.ids)) for piece in pieces]]
    if masked:
        kinds = [kind for kind, length in runs for _ in range(length)]
        for position in masked:
            kinds[len(prompt_ids) + position] = SegmentKind.AMBIGUOUS
        runs = [(kind, 1) for kind in kinds]
    segments: list[Segment] = []
    start = stop = 0
    for (kind, length), (following, _) in zip(runs, [*runs[1:], (None, 0)], strict=True):
        stop += length
        if kind is not following and stop > start:
            segments.append(Segment(kind=kind, start=start, stop=stop))
            start = stop
    return TokenSample(
        sample_id=completion.sample_id,
        dataset=completion.dataset,
        input_ids=(*prompt_ids, *(_ids(pieces) if ids is None else ids)),
        num_prompt_tokens=len(prompt_ids),
        segments=tuple(segments),
        exactness=exactness,
        delta=delta,
        provider=completion.provider,
        model=completion.model,
        finish_reason=completion.finish_reason,
    )


def _finding(
    completion: Completion, rule: str, severity: Severity, detail: str, position: int | None = None
) -> AuditFinding:
    return AuditFinding(
        rule=rule,
        severity=severity,
        sample_id=completion.sample_id,
        detail=detail,
        provider=completion.provider,
        position=position,
    )


def _describe(variant: _Variant) -> str:
    habits = ", ".join(f"{axis} {getattr(variant.habits, axis)}" for axis in AXES if axis not in BILLING_AXES)
    close = "" if variant.shape.close is Close.TOKEN else f", close {variant.shape.close.value}"
    return f"only this spelling fits the billed count: {habits}{close}"


def _distinct(variants: Sequence[_Variant], *, known: _Variant) -> list[_Variant]:
    """Return one variant per id sequence, without that of `known`; all of one answer."""
    found = {id(variant.ids): variant for variant in reversed(variants)}
    found.pop(id(known.ids), None)
    return list(found.values())


def _ids(pieces: Sequence[Piece]) -> tuple[int, ...]:
    joined: list[int] = []
    for piece in pieces:
        joined += piece.ids
    return tuple(joined)


def _differences(first: Sequence[int], second: Sequence[int]) -> Iterator[int]:
    """Yield the positions, within the shorter, at which two sequences differ."""
    return (index for index, (mine, other) in enumerate(zip(first, second, strict=False)) if mine != other)
