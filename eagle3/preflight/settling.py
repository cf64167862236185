"""What a provider's replies to designed questions leave of the habits it may have. Pure.

A question whose answer is known tells more than a found answer: the limit on its length bounds how many tokens the
model can have written, whatever was billed, so that a space put into the text and an end token left off the bill, which
count alike, come apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from eagle3.errors import TokenError
from eagle3.records import Completion
from eagle3.tokens.grammar import ResponseGrammar
from eagle3.tokens.layout import SPACE, Edge, Habits, billed_count, edges_of, lay_out, shapes_of
from eagle3.tokens.profiles import AXES, habits_of
from eagle3.tokens.tokenizer import Tokenizer

MIN_BARE_TEXTS = 2
"""Texts without a space where a provider would have put one, before it counts as one that does not."""

_PUT_THERE: Mapping[Edge, Mapping[str, frozenset[str]]] = {
    Edge.HEAD: {"head_space": frozenset({"strip"})},
    Edge.TAIL: {"tail_space": frozenset({"strip", "strip_all"})},
    Edge.END: {"tail_space": frozenset({"strip_all"})},
}
"""Habits that put a space at an edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """One answered question."""

    name: str
    max_tokens: int
    completion: Completion
    repeats: str | None = None
    """Name of the question that this one asks again with a smaller limit."""


def surviving(probed: Sequence[Probed], grammar: ResponseGrammar, tokenizer: Tokenizer, mode: str) -> list[Habits]:
    """Return the combinations of habits under which all answers are possible.

    Answers that no combination explains say something about the model, not about the provider, and are passed over.
    """
    combinations = habits_of(grammar, mode)
    fits = [[_is_possible(each, habits, grammar, tokenizer, mode) for habits in combinations] for each in probed]
    used = [row for row in fits if any(row)]
    left = [habits for index, habits in enumerate(combinations) if all(row[index] for row in used)]
    left = [habits for habits in left if not _is_refuted_by_repeats(habits, probed, grammar, tokenizer, mode)]
    refuted = _refuted_values(probed, grammar, mode)
    return [habits for habits in left if all(getattr(habits, axis) not in values for axis, values in refuted.items())]


def settled_axes(left: Sequence[Habits], grammar: ResponseGrammar, mode: str) -> dict[str, list[str | bool]]:
    """Return the axes of which only some values are left, with these values; nothing when no combination is left."""
    settled: dict[str, list[str | bool]] = {}
    if not left:
        return settled
    for axis in AXES:
        offered = {getattr(habits, axis) for habits in habits_of(grammar, mode)}
        values = {getattr(habits, axis) for habits in left}
        if values < offered:
            settled[axis] = sorted(values, key=str)
    return settled


def shortest_length(completion: Completion, grammar: ResponseGrammar, tokenizer: Tokenizer, mode: str) -> int | None:
    """Return the fewest ids the model can have written for an answer under any habits; None when none explains it."""
    probe = Probed(name="", max_tokens=completion.usage.completion_tokens + 1_000_000, completion=completion)
    lengths = [
        length
        for habits in habits_of(grammar, mode)
        for length, billed in _lengths(probe, habits, grammar, tokenizer, mode)
        if billed == completion.usage.completion_tokens
    ]
    return min(lengths, default=None)


def _lengths(
    probed: Probed, habits: Habits, grammar: ResponseGrammar, tokenizer: Tokenizer, mode: str
) -> list[tuple[int, int]]:
    """Return (ids written, ids billed) for each shape the answer can have."""
    lengths: list[tuple[int, int]] = []
    for shape in shapes_of(probed.completion, grammar, mode):
        try:
            pieces = lay_out(probed.completion, grammar, mode, habits, shape, tokenizer.encode_ordinary)
        except TokenError:
            continue
        ids = list(chain.from_iterable(piece.ids for piece in pieces))
        lengths.append((len(ids), billed_count(pieces, grammar, mode, habits)))
    return lengths


def _is_possible(probed: Probed, habits: Habits, grammar: ResponseGrammar, tokenizer: Tokenizer, mode: str) -> bool:
    completion = probed.completion
    is_ended = completion.finish_reason in grammar.end
    for length, billed in _lengths(probed, habits, grammar, tokenizer, mode):
        fits_limit = length <= probed.max_tokens if is_ended else True
        if fits_limit and billed == completion.usage.completion_tokens:
            return True
    return False


def _is_refuted_by_repeats(
    habits: Habits, probed: Sequence[Probed], grammar: ResponseGrammar, tokenizer: Tokenizer, mode: str
) -> bool:
    """Whether an answer that these habits make short enough for a limit was cut by it all the same."""
    by_name = {each.name: each for each in probed}
    for each in probed:
        whole = by_name.get(each.repeats or "")
        if whole is None or each.completion.finish_reason in grammar.end:
            continue
        is_same = (whole.completion.reasoning, whole.completion.content) == (
            each.completion.reasoning,
            each.completion.content,
        )
        lengths = _lengths(whole, habits, grammar, tokenizer, mode)
        if is_same and lengths and max(length for length, _ in lengths) <= each.max_tokens:
            return True
    return False


def _refuted_values(probed: Sequence[Probed], grammar: ResponseGrammar, mode: str) -> dict[str, frozenset[str]]:
    """Return the habits that would have put a space where texts have none."""
    bare: dict[Edge, int] = {}
    for each in probed:
        try:
            edges = list(edges_of(each.completion, grammar, mode))
        except TokenError:
            continue
        for edge, text in edges:
            has_space = text.startswith(SPACE) if edge is Edge.HEAD else text.endswith(SPACE)
            bare[edge] = bare.get(edge, 0) + (not has_space)
    refuted: dict[str, frozenset[str]] = {}
    for edge, habits in _PUT_THERE.items():
        if bare.get(edge, 0) >= MIN_BARE_TEXTS:
            for axis, values in habits.items():
                refuted[axis] = refuted.get(axis, frozenset()) | values
    return refuted
