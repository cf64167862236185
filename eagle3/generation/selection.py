"""Which endpoints may answer, for a recipe."""

from collections.abc import Sequence

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
