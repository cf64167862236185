"""Which endpoint answers a request: the request's `provider` object applied to the scenario's providers. Pure."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, cast

from eagle3.simulator.scenario import Provider, draw

FAMILIES = {"fp4": frozenset({"fp4", "mxfp4", "nvfp4"}), "fp8": frozenset({"fp8", "mxfp8"})}
"""A quantization filter that means more than its own name (provider-routing documentation)."""

SAMPLING_PARAMETERS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "top_a", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "seed", "stop", "tools", "tool_choice",
        "response_format", "reasoning", "include_reasoning", "max_tokens", "max_completion_tokens",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The endpoints that may answer, best first; or why none may."""

    providers: tuple[Provider, ...] = ()
    refusal: str | None = None
    constraint: str | None = None
    """Machine-readable name of the constraint that left none."""


class MalformedRoutingError(ValueError):
    """The request's `provider` object has a field of the wrong type."""


def _names(preferences: Mapping[str, Any], field: str) -> Sequence[str] | None:
    value: Any = preferences.get(field)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[Any]", value)):
        raise MalformedRoutingError(f"provider.{field}: expected an array of strings")
    return cast("list[str]", value)


def _price_cap(preferences: Mapping[str, Any], field: str) -> Decimal | None:
    caps: Any = preferences.get("max_price")
    if caps is None:
        return None
    if not isinstance(caps, dict):
        raise MalformedRoutingError("provider.max_price: expected an object")
    value: Any = cast("dict[str, Any]", caps).get(field)
    if value is None:
        return None
    try:
        cap = Decimal(str(value))
    except InvalidOperation as exc:
        raise MalformedRoutingError(f"provider.max_price.{field}: expected a number") from exc
    if not cap.is_finite():
        raise MalformedRoutingError(f"provider.max_price.{field}: expected a finite number")
    return cap


def _allowed_quantizations(names: Sequence[str]) -> frozenset[str]:
    return frozenset().union(*(FAMILIES.get(name, frozenset({name})) for name in names))


def route(request: Mapping[str, Any], endpoints: Sequence[Provider], *, seed: int, body_digest: str) -> Route:
    """Order the endpoints that may answer this request.

    Without `order` or `sort` the order is a weighted draw, 1/price² each, that depends on the seed and the body alone.

    Args:
        request: The parsed body.
        endpoints: All endpoints of the model.
        seed: Of the scenario.
        body_digest: sha256 of the body as received.

    Raises:
        MalformedRoutingError: A field of `provider` has the wrong type.
    """
    stated: Any = request.get("provider")
    if stated is not None and not isinstance(stated, dict):
        raise MalformedRoutingError("provider: expected an object")
    preferences = cast("dict[str, Any]", stated or {})
    left = [p for p in endpoints if p.status == 0]
    if not left:
        return Route(refusal="No endpoints found for this model.", constraint="no_endpoints")
    order = _names(preferences, "order")
    filters: list[tuple[str, Callable[[Provider], bool]]] = [
        *_provider_filters(preferences, order),
        *_endpoint_filters(preferences),
        *_request_filters(request, is_strict=preferences.get("require_parameters") is True),
    ]
    for constraint, is_allowed in filters:
        left = [p for p in left if is_allowed(p)]
        if not left:
            return Route(refusal=_REFUSALS.get(constraint) or _REFUSAL.format(constraint), constraint=constraint)
    return Route(providers=tuple(_ordered(left, order, preferences.get("sort"), seed, body_digest)))


_REFUSAL = "No endpoints found that can handle the requested parameters ({})."
_REFUSALS = {
    "provider": "No allowed providers are available for the selected model.",
    "tools": "No endpoints found that support tool use.",
}


def _provider_filters(
    preferences: Mapping[str, Any], order: Sequence[str] | None
) -> Iterator[tuple[str, Callable[[Provider], bool]]]:
    only, ignore = _names(preferences, "only"), _names(preferences, "ignore")
    if only is not None:
        yield "provider", lambda p: any(map(p.is_named, only))
    if ignore is not None:
        yield "provider", lambda p: not any(map(p.is_named, ignore))
    if order is not None and preferences.get("allow_fallbacks") is False:
        yield "provider", lambda p: any(map(p.is_named, order))


def _endpoint_filters(preferences: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[Provider], bool]]]:
    quantizations = _names(preferences, "quantizations")
    if quantizations is not None:
        allowed = _allowed_quantizations(quantizations)
        yield "quantizations", lambda p: (p.quantization or "unknown") in allowed
    prompt_cap, completion_cap = _price_cap(preferences, "prompt"), _price_cap(preferences, "completion")
    if prompt_cap is not None:
        yield "max_price", lambda p: p.prompt_usd_per_mtok <= prompt_cap
    if completion_cap is not None:
        yield "max_price", lambda p: p.completion_usd_per_mtok <= completion_cap


def _request_filters(
    request: Mapping[str, Any], *, is_strict: bool
) -> Iterator[tuple[str, Callable[[Provider], bool]]]:
    if request.get("tools"):
        yield "tools", lambda p: "tools" in p.supported_parameters
    if is_strict:
        wanted = SAMPLING_PARAMETERS.intersection(request)
        yield "require_parameters", lambda p: wanted.issubset(p.supported_parameters)
    max_tokens: Any = request.get("max_tokens") or request.get("max_completion_tokens")
    if isinstance(max_tokens, int):
        yield "max_tokens", lambda p: max_tokens <= (p.max_completion_tokens or p.context_length)


def _ordered(
    left: Sequence[Provider], order: Sequence[str] | None, sort: object, seed: int, body_digest: str
) -> list[Provider]:
    def cost(provider: Provider) -> float:
        return float(provider.prompt_usd_per_mtok + provider.completion_usd_per_mtok)

    def drawn(provider: Provider) -> float:
        # Weighted sampling without replacement: ascending -ln(u) / weight, weight = 1 / price².
        return -math.log(draw(seed, "route", body_digest, provider.tag)) * cost(provider) ** 2

    by = cast("dict[str, Any]", sort).get("by") if isinstance(sort, dict) else sort
    if by == "price":
        ranked = sorted(left, key=cost)
    elif by in ("latency", "throughput"):
        ranked = sorted(left, key=lambda p: p.latency.median_s)
    else:
        ranked = sorted(left, key=drawn)
    if order is not None:

        def place(provider: Provider) -> int:
            return next((i for i, slug in enumerate(order) if provider.is_named(slug)), len(order))

        ranked.sort(key=place)
    return ranked
