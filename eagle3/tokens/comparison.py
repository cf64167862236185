"""What several providers of one model say about each other.

Some habits bill alike: a provider that adds a space before the end token, and one that sends a space of the model's own
but does not bill the end. Counts of one provider never tell them apart. Answers of the others do: when the model sends
a space at some edge practically never through them, and practically always through this one, the space is this
provider's. Both sides must be many, and the others' texts must explain what they billed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from eagle3.errors import TokenError
from eagle3.records import Completion
from eagle3.tokens.grammar import ResponseGrammar
from eagle3.tokens.layout import SPACE, Edge, edges_of
from eagle3.tokens.probed import Settled
from eagle3.tokens.profiles import MIN_AGREEMENT, ProviderProfile, fit_profile
from eagle3.tokens.tokenizer import Tokenizer

ALWAYS = 0.95
"""Share of spaced edges from which on a provider is taken to add the space. Not 1: a few answers are odd."""
NEVER = 0.05
"""Share of spaced edges up to which the model is taken not to write the space itself. A model that ends a quarter of
its answers with a space, or starts them so, settles nothing."""

ProviderModel = tuple[str, str]

_LEFT_BY: Mapping[Edge, tuple[str, frozenset[str]]] = {
    Edge.HEAD: ("head_space", frozenset({"strip"})),
    Edge.TAIL: ("tail_space", frozenset({"strip", "strip_all"})),
    Edge.END: ("tail_space", frozenset({"strip_all"})),
}
"""Per edge that a provider spaces: the axis it settles, and the values it leaves."""


@dataclass(frozen=True, slots=True)
class EdgeSpaces:
    """How often texts of one provider have a space where they touch a control token."""

    num_texts: dict[Edge, int] = field(default_factory=dict[Edge, int])
    num_spaced: dict[Edge, int] = field(default_factory=dict[Edge, int])

    def add(self, edge: Edge, *, is_spaced: bool) -> None:
        """Count one text."""
        self.num_texts[edge] = self.num_texts.get(edge, 0) + 1
        self.num_spaced[edge] = self.num_spaced.get(edge, 0) + is_spaced

    def share(self, edge: Edge) -> float:
        """Return the share of spaced texts; 0 when there are none."""
        return self.num_spaced.get(edge, 0) / max(self.num_texts.get(edge, 0), 1)


def count_spaces(completions: Sequence[Completion], grammar: ResponseGrammar, mode: str) -> EdgeSpaces:
    """Count spaced edges in the answers of one provider; answers the grammar has no place for are passed over."""
    spaces = EdgeSpaces()
    for completion in completions:
        try:
            edges = list(edges_of(completion, grammar, mode))
        except TokenError:
            continue
        for edge, text in edges:
            is_spaced = text.startswith(SPACE) if edge is Edge.HEAD else text.endswith(SPACE)
            spaces.add(edge, is_spaced=is_spaced)
    return spaces


def settled_axes(own: EdgeSpaces, others: Sequence[EdgeSpaces], *, min_samples: int) -> dict[str, frozenset[str]]:
    """Return the axes that a comparison settles, with the values that are left.

    Args:
        own: Of the provider in question.
        others: Of other providers of the same model in the same mode, whose texts explain what they billed.
        min_samples: Texts needed on either side.
    """
    settled: dict[str, frozenset[str]] = {}
    for edge, (axis, values) in _LEFT_BY.items():
        seen = sum(spaces.num_texts.get(edge, 0) for spaces in others)
        spaced = sum(spaces.num_spaced.get(edge, 0) for spaces in others)
        if own.num_texts.get(edge, 0) < min_samples or seen < min_samples:
            continue
        if own.share(edge) >= ALWAYS and spaced <= NEVER * seen:
            settled[axis] = settled.get(axis, values) & values
    return settled


def fit_providers(
    groups: Mapping[ProviderModel, Sequence[Completion]],
    grammar: ResponseGrammar,
    tokenizer: Tokenizer,
    mode: str,
    *,
    min_samples: int,
    probed: Settled | None = None,
) -> dict[ProviderModel, ProviderProfile]:
    """Learn the habits of all providers, first from each one's counts, then from each other.

    Args:
        groups: (provider, model) -> its answers, at least one each.
        grammar: Of the target's family.
        tokenizer: Of the target.
        mode: Mode of the grammar.
        min_samples: Answers needed to rule something out.
        probed: What designed questions settled before the answers were bought.
    """
    profiles = {
        key: _fit_probed(members, grammar, tokenizer, mode, min_samples, (probed or {}).get(key[0], {}))
        for key, members in groups.items()
    }
    spaces = {key: count_spaces(members, grammar, mode) for key, members in groups.items()}
    witnesses = {
        key
        for key, profile in profiles.items()
        if profile.num_samples >= min_samples and profile.num_exact >= MIN_AGREEMENT * profile.num_samples
    }
    for (provider, model), alone in list(profiles.items()):
        others = [spaces[key] for key in sorted(witnesses) if key[0] != provider and key[1] == model]
        settled = settled_axes(spaces[provider, model], others, min_samples=min_samples)
        offered = {axis: values & set(getattr(grammar.variants, axis)) for axis, values in settled.items()}
        settled = {axis: values for axis, values in offered.items() if values and not alone.axes[axis].identified}
        if not settled or alone.compared:
            continue
        compared = fit_profile(
            groups[provider, model], grammar, tokenizer, mode, min_samples=min_samples, settled=settled
        )
        # Evidence that makes the counts fit worse is no evidence.
        if compared.num_exact >= MIN_AGREEMENT * alone.num_exact:
            profiles[provider, model] = compared
    return profiles


def _fit_probed(
    members: Sequence[Completion],
    grammar: ResponseGrammar,
    tokenizer: Tokenizer,
    mode: str,
    min_samples: int,
    probed: Mapping[str, frozenset[str | bool]],
) -> ProviderProfile:
    """Learn habits within what probes left, unless the counts of the answers say otherwise."""
    alone = fit_profile(members, grammar, tokenizer, mode, min_samples=min_samples)
    if not probed:
        return alone
    within = fit_profile(members, grammar, tokenizer, mode, min_samples=min_samples, settled=probed)
    return within if within.num_exact >= MIN_AGREEMENT * alone.num_exact else alone
