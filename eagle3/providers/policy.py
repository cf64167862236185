"""Which endpoints may answer and what they may cost. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from eagle3.errors import RunRejectedError
from eagle3.providers.base import Endpoint, PriceCap
from eagle3.recipe import Routing

MIN_UPTIME_PERCENT = 95.0
"""Endpoints known to be down more than this over half an hour are left out."""
HEALTHY = 0
"""`status` of an endpoint in service; the meaning of negative values is not documented."""

_MTOK = Decimal(1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Endpoints of one model after the recipe's filters."""

    eligible: Sequence[Endpoint]
    refused: Sequence[tuple[Endpoint, str]]
    """Each with the first reason."""

    @property
    def cap(self) -> PriceCap:
        """Dearest prices over the eligible endpoints."""
        return PriceCap(
            prompt_usd=max(endpoint.prompt_usd for endpoint in self.eligible),
            completion_usd=max(endpoint.completion_usd for endpoint in self.eligible),
            request_usd=max(endpoint.request_usd for endpoint in self.eligible),
        )

    def expected_usd(self, prompt_tokens: float, completion_tokens: float) -> Decimal:
        """Return the mean cost when the router weighs endpoints by 1 / price squared, its documented default."""
        costs = [
            Decimal(prompt_tokens) * endpoint.prompt_usd + Decimal(completion_tokens) * endpoint.completion_usd
            for endpoint in self.eligible
        ]
        if not all(costs):
            return Decimal(0)
        weights = [1 / (cost * cost) for cost in costs]
        return sum((cost * weight for cost, weight in zip(costs, weights, strict=True)), Decimal(0)) / sum(weights)


def select(
    endpoints: Sequence[Endpoint], routing: Routing, *, model: str, max_tokens: int, needs_tools: bool = False
) -> Selection:
    """Filter endpoints by the recipe.

    Raises:
        RunRejectedError: None is left; the message lists each with its reason.
    """
    eligible: list[Endpoint] = []
    refused: list[tuple[Endpoint, str]] = []
    for endpoint in endpoints:
        reason = _reason_against(endpoint, routing, max_tokens, needs_tools=needs_tools)
        if reason is None:
            eligible.append(endpoint)
        else:
            refused.append((endpoint, reason))
    if not eligible:
        lines = "\n  ".join(f"{endpoint.tag}: {reason}" for endpoint, reason in refused[:5]) or "the list is empty"
        more = f"\n  … and {len(refused) - 5} more" if len(refused) > 5 else ""
        message = (
            f"no endpoint of {model!r} may answer requests of {max_tokens} tokens:\n  {lines}{more}\n"
            "Widen generation.provider.routing, lower sampling.max_tokens, or wait until an endpoint is back."
        )
        raise RunRejectedError(message)
    return Selection(eligible=tuple(eligible), refused=tuple(refused))


def names_slug(endpoint: Endpoint, slug: str) -> bool:
    """Return whether a routing slug means this endpoint: its tag, the part before the slash, or its display name."""
    wanted = slug.lower()
    return wanted in (endpoint.tag.lower(), endpoint.tag.lower().split("/", 1)[0], endpoint.provider.lower())


def _reason_against(endpoint: Endpoint, routing: Routing, max_tokens: int, *, needs_tools: bool) -> str | None:  # noqa: PLR0911 - one return per reason
    quantization = endpoint.quantization or "unknown"
    if endpoint.status != HEALTHY:
        return f"status is {endpoint.status}, expected {HEALTHY}"
    if quantization not in routing.quantizations:
        return f"quantization {quantization!r} is not in {list(routing.quantizations)}"
    if routing.only and not any(names_slug(endpoint, slug) for slug in routing.only):
        return "not in routing.only"
    if any(names_slug(endpoint, slug) for slug in routing.ignore):
        return "in routing.ignore"
    if endpoint.max_completion_tokens is not None and endpoint.max_completion_tokens < max_tokens:
        return f"answers end at {endpoint.max_completion_tokens} tokens, {max_tokens} are asked for"
    if endpoint.context_length is not None and endpoint.context_length < max_tokens:
        return f"context is {endpoint.context_length} tokens, {max_tokens} are asked for"
    needed = {"max_tokens"} | ({"tools"} if needs_tools else set())
    missing = sorted(needed - set(endpoint.supported_parameters)) if endpoint.supported_parameters else []
    if missing:
        return f"does not support {missing}"
    if endpoint.uptime_30m is not None and endpoint.uptime_30m < MIN_UPTIME_PERCENT:
        return f"uptime of the last 30 min is {endpoint.uptime_30m:g} %, expected {MIN_UPTIME_PERCENT:g} % or more"
    limits = (
        ("prompt", endpoint.prompt_usd, routing.max_prompt_price_usd_per_mtok),
        ("completion", endpoint.completion_usd, routing.max_completion_price_usd_per_mtok),
    )
    for name, price, limit in limits:
        if limit is not None and price * _MTOK > limit:
            return f"{name} price is {price * _MTOK:f} USD per million tokens, the recipe allows {limit}"
    return None
