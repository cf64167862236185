"""What a provider does to answers, learned from the counts it bills.

Each combination of habits predicts how many completion tokens an answer was billed. The combination that predicts most
answers exactly is the profile; a rival is ruled out only by enough answers on which exactly one of the two is right.
Rivals are compared as whole combinations, so two habits that hide one another (a space too many, an end token not
billed) are seen to do so.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, product
from pathlib import Path
from typing import Any, cast

from eagle3.errors import CorruptShardError, TokenError
from eagle3.records import Completion, JsonObject
from eagle3.tokens.grammar import ResponseGrammar
from eagle3.tokens.layout import Habits, Piece, billed_count, lay_out, shapes_of
from eagle3.tokens.tokenizer import Tokenizer

AXES = tuple(field.name for field in fields(Habits))
BILLING_AXES = ("end_billed", "close_billed")
"""Axes that change only the billed count. The others are those of `Habits.text_key`."""
MIN_AGREEMENT = 0.9
"""Share of discriminating answers that must favour the profile before a rival is ruled out.

Not nearer to 1, because models write some texts in other tokens than the usual ones, and such an answer may fit a rival
by chance. Source: 0.5 to 6.5 % of the answers of large models, more of small ones sampled freely. A minority of answers
with another habit stays visible as count mismatches.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisFit:
    """What is known about one habit."""

    value: str | bool
    """As in the profile."""
    identified: bool
    """Whether every rival with another value is ruled out, or differs in none of enough answers."""
    discriminating: int
    """Answers that tell the profile from its best rival with another value; the smallest such number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderProfile:
    """The habits of one provider with one model in one mode."""

    provider: str
    model: str
    mode: str
    habits: Habits
    rivals: tuple[Habits, ...]
    """Combinations that were not ruled out, the profile's own excluded."""
    axes: Mapping[str, AxisFit]
    num_samples: int
    num_exact: int
    """Answers whose count the profile predicts exactly."""
    deltas: Mapping[int, int]
    """Rebuilt minus billed tokens under the profile -> number of answers."""
    compared: tuple[str, ...] = ()
    """Axes that the counts alone leave open and that other evidence settled: probes, or other providers of the same
    model; see `comparison`."""

    @property
    def billing_is_identified(self) -> bool:
        """Whether it is known what counts as a completion token."""
        return all(self.axes[axis].identified for axis in BILLING_AXES)

    def to_json(self) -> JsonObject:
        """Return the profile as small JSON, for the run's files and reports."""
        return {
            "provider": self.provider,
            "model": self.model,
            "mode": self.mode,
            "habits": {axis: getattr(self.habits, axis) for axis in AXES},
            "identified": {axis: fit.identified for axis, fit in self.axes.items()},
            "discriminating": {axis: fit.discriminating for axis, fit in self.axes.items()},
            "rivals": [{axis: getattr(rival, axis) for axis in AXES} for rival in self.rivals],
            "samples": self.num_samples,
            "exact": self.num_exact,
            "deltas": {str(delta): count for delta, count in sorted(self.deltas.items())},
            "compared": list(self.compared),
        }


def profile_from_json(values: Mapping[str, Any]) -> ProviderProfile:
    """Return the profile that `ProviderProfile.to_json` wrote."""
    habits = Habits(**values["habits"])
    return ProviderProfile(
        provider=values["provider"],
        model=values["model"],
        mode=values["mode"],
        habits=habits,
        rivals=tuple(Habits(**rival) for rival in values["rivals"]),
        axes={
            axis: AxisFit(
                value=getattr(habits, axis),
                identified=values["identified"][axis],
                discriminating=values["discriminating"][axis],
            )
            for axis in AXES
        },
        num_samples=values["samples"],
        num_exact=values["exact"],
        deltas={int(delta): count for delta, count in values["deltas"].items()},
        compared=tuple(values.get("compared", ())),
    )


def habits_of(grammar: ResponseGrammar, mode_name: str) -> list[Habits]:
    """Return all combinations of habits a provider may have, the default one first.

    Earlier ones need fewer assumptions: among equals, billing keeps its default before texts do.
    """
    variants = grammar.variants
    has_close = grammar.mode(mode_name).close is not None
    close_billed = variants.close_billed if has_close else variants.close_billed[:1]
    args_style = variants.args_style if grammar.tools is not None else variants.args_style[:1]
    return [
        Habits(close_billed=close, end_billed=end, args_style=args, padding=padding, tail_space=tail, head_space=head)
        for close, end, args, padding, tail, head in product(
            close_billed, variants.end_billed, args_style, variants.padding, variants.tail_space, variants.head_space
        )
    ]


def fit_profile(
    completions: Sequence[Completion],
    grammar: ResponseGrammar,
    tokenizer: Tokenizer,
    mode: str,
    *,
    min_samples: int,
    settled: Mapping[str, frozenset[str | bool]] | None = None,
) -> ProviderProfile:
    """Learn the habits of one provider from its answers.

    Args:
        completions: Of one provider and one model, at least one. Those the grammar cannot lay out, or that were not
            billed, tell nothing and are passed over.
        grammar: Of the target's family.
        tokenizer: Of the target.
        mode: Mode of the grammar.
        min_samples: Discriminating answers needed to rule a rival out.
        settled: Axis -> the values that other evidence leaves; combinations with another value are not considered.
    """
    known = settled or {}
    combinations = [
        habits
        for habits in habits_of(grammar, mode)
        if all(getattr(habits, axis) in values for axis, values in known.items())
    ]
    rows: list[list[int]] = []
    spelled: list[list[int]] = []
    for completion in completions:
        spellings = spell(completion, grammar, tokenizer, mode, combinations)
        if spellings is None:
            continue
        rows.append([delta for _, delta in spellings])
        spelled.append([hash(ids) for ids, _ in spellings])
    exact = [sum(1 for row in rows if row[index] == 0) for index in range(len(combinations))]
    best = exact.index(max(exact))
    favouring, against = _duels(rows, best, len(combinations))
    is_rival = [
        index != best
        and not (
            favouring[index] + against[index] >= min_samples
            and favouring[index] >= MIN_AGREEMENT * (favouring[index] + against[index])
        )
        for index in range(len(combinations))
    ]
    is_distinct = [
        len(rows) < min_samples
        or any(row[index] != row[best] or ids[index] != ids[best] for row, ids in zip(rows, spelled, strict=True))
        for index in range(len(combinations))
    ]
    axes: dict[str, AxisFit] = {}
    for axis in AXES:
        value = getattr(combinations[best], axis)
        others = [index for index, habits in enumerate(combinations) if getattr(habits, axis) != value]
        axes[axis] = AxisFit(
            value=value,
            identified=not any(is_rival[index] and is_distinct[index] for index in others),
            discriminating=min((favouring[index] + against[index] for index in others), default=0),
        )
    deltas: dict[int, int] = {}
    for row in rows:
        deltas[row[best]] = deltas.get(row[best], 0) + 1
    return ProviderProfile(
        provider=completions[0].provider,
        model=completions[0].model,
        mode=mode,
        habits=combinations[best],
        rivals=tuple(habits for index, habits in enumerate(combinations) if is_rival[index]),
        axes=axes,
        num_samples=len(rows),
        num_exact=exact[best],
        deltas=deltas,
        compared=tuple(sorted(known)),
    )


def spell(
    completion: Completion,
    grammar: ResponseGrammar,
    tokenizer: Tokenizer,
    mode: str,
    combinations: Sequence[Habits],
) -> list[tuple[tuple[int, ...], int]] | None:
    """Return completion ids and rebuilt minus billed tokens under each combination; None when nothing can be told."""
    if completion.usage.completion_tokens <= 0:
        return None
    encode = CachedEncoder(tokenizer)
    known: dict[tuple[object, ...], tuple[tuple[int, ...], list[Piece]]] = {}
    spellings: list[tuple[tuple[int, ...], int]] = []
    try:
        shape = shapes_of(completion, grammar, mode)[0]
        for habits in combinations:
            key = habits.text_key(completion, shape)
            if key not in known:
                pieces = lay_out(completion, grammar, mode, habits, shape, encode)
                known[key] = tuple(chain.from_iterable(piece.ids for piece in pieces)), pieces
            ids, pieces = known[key]
            spellings.append((ids, billed_count(pieces, grammar, mode, habits) - completion.usage.completion_tokens))
    except TokenError:
        return None
    return spellings


class CachedEncoder:
    """Ordinary encoding that remembers the texts of one answer, whose variants differ little."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with nothing remembered."""
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[int, ...]] = {}

    def __call__(self, text: str) -> tuple[int, ...]:
        """Return the ids of ordinary text."""
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = tuple(self._tokenizer.encode_ordinary(text))
        return found


def _duels(rows: Sequence[Sequence[int]], best: int, num_combinations: int) -> tuple[list[int], list[int]]:
    """Count, per combination, the answers that only `best` predicts and those that only the other predicts."""
    favouring, against = [0] * num_combinations, [0] * num_combinations
    for row in rows:
        best_fits = row[best] == 0
        for index, delta in enumerate(row):
            if best_fits and delta != 0:
                favouring[index] += 1
            elif not best_fits and delta == 0:
                against[index] += 1
    return favouring, against


def write_profiles(path: Path, profiles: Sequence[ProviderProfile]) -> None:
    """Write profiles as a JSON list."""
    text = json.dumps([profile.to_json() for profile in profiles], indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_profiles(path: Path) -> list[ProviderProfile]:
    """Read what `write_profiles` wrote.

    Raises:
        CorruptShardError: The file is not one of ours.
    """
    try:
        document: object = json.loads(path.read_bytes())
        if not isinstance(document, list):
            raise TypeError("expected a list")
        return [profile_from_json(values) for values in cast("list[dict[str, Any]]", document)]
    except (ValueError, KeyError, TypeError) as exc:
        raise CorruptShardError(
            f"{path.name!r} cannot be read as provider profiles: {exc!r}. Redo the reconstruction stage."
        ) from exc
