"""Which endpoints may answer, for a recipe."""

from collections.abc import Mapping, Sequence

from eagle3.providers.base import Endpoint
from eagle3.providers.policy import Selection, select
from eagle3.recipe import OpenAICompatible, Recipe, Routing, SGLang


def select_endpoints(
    recipe: Recipe, endpoints: Sequence[Endpoint], *, max_tokens: int, needs_tools: bool = False
) -> Selection:
    """Filter endpoints by the recipe's routing; a server of one's own is taken as it is.

    Raises:
        RunRejectedError: None is left.
    """
    section = recipe.generation.provider
    if isinstance(section, (OpenAICompatible, SGLang)):
        anything = Routing(quantizations=("unknown",))
        return select(endpoints, anything, model=section.model, max_tokens=max_tokens)
    return select(endpoints, section.routing, model=section.model, max_tokens=max_tokens, needs_tools=needs_tools)


def quantizations_of(recipe: Recipe, endpoints: Sequence[Endpoint]) -> Mapping[str, str | None]:
    """Return the precision of each provider; None for one that serves several which the recipe allows.

    Args:
        recipe: Its routing says what is allowed.
        endpoints: Every endpoint that was ever listed to this run.
    """
    section = recipe.generation.provider
    is_own = isinstance(section, (OpenAICompatible, SGLang))
    found: dict[str, set[str | None]] = {}
    for endpoint in endpoints:
        if is_own or (endpoint.quantization or "unknown") in section.routing.quantizations:
            found.setdefault(endpoint.provider, set()).add(endpoint.quantization)
    return {name: next(iter(kinds)) if len(kinds) == 1 else None for name, kinds in found.items()}
