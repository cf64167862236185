"""OpenRouter, and everything that speaks its protocol: the look-alike too."""

import json
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, cast

import httpx

from eagle3.errors import ProviderError
from eagle3.providers.base import (
    AccountUsage,
    ChatRequest,
    Endpoint,
    GenerationRecord,
    OnAccepted,
    PriceCap,
    RawReply,
    money,
)
from eagle3.providers.connection import ApiKey, Connection
from eagle3.recipe import Routing
from eagle3.records import JsonObject

CACHE_TTL_S = 86_400
"""Longest life of a cached reply; a lost reply can be fetched again for a day."""
USAGE_LAG_S = 120.0
"""The lag of the key's usage figure is not documented; after two quiet minutes it is believed."""

_PRICED = ("prompt", "completion", "request")
_MTOK = Decimal(1_000_000)


class OpenRouterProvider:
    """Chat completions over OpenRouter's HTTP API, never retried."""

    name = "openrouter"
    names_providers = True

    def __init__(
        self,
        *,
        base_url: str,
        key: ApiKey,
        model: str,
        routing: Routing,
        response_cache: bool,
        stream: bool = False,
        usage_lag_s: float = USAGE_LAG_S,
        answers_outlive_us: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare a client; nothing is sent.

        Args:
            base_url: Root of the API.
            key: Bearer token.
            model: Slug, for example `moonshotai/kimi-k2.5`.
            routing: The recipe's filters.
            response_cache: Ask the service to keep replies, so that a lost one is not paid for twice.
            stream: Receive answers as server-sent events.
            usage_lag_s: Quiet seconds after which the key's usage is believed.
            answers_outlive_us: False for a server that dies with this process.
            transport: For tests.
        """
        headers = {"x-openrouter-title": "eagle3-pipeline"}
        if response_cache:
            headers |= {"x-openrouter-cache": "true", "x-openrouter-cache-ttl": str(CACHE_TTL_S)}
        self._connection = Connection(base_url, key, headers, transport)
        self._model = model
        self._routing = routing
        self._stream = stream
        self.usage_lag_s: float | None = usage_lag_s
        self.answers_outlive_us = answers_outlive_us

    async def list_endpoints(self) -> Sequence[Endpoint]:
        """Return all endpoints of the model, with their dearest price tier."""
        found = await self._connection.get_json(f"models/{self._model}/endpoints")
        data = _mapping((found or {}).get("data"))
        listed: list[Any] = data.get("endpoints") or []
        return tuple(_endpoint(_mapping(entry)) for entry in listed)

    def routing(self, tags: Sequence[str], cap: PriceCap, ignore: Sequence[str]) -> JsonObject:
        """Return the `provider` object: filters twice over (by name and by property), and the price limit."""
        chosen: JsonObject = {
            "quantizations": list(self._routing.quantizations),
            "max_price": {
                "prompt": float(cap.prompt_usd * _MTOK),
                "completion": float(cap.completion_usd * _MTOK),
                **({"request": float(cap.request_usd)} if cap.request_usd else {}),
            },
            "only": list(tags),
        }
        ignored = sorted({*self._routing.ignore, *ignore})
        if ignored:
            chosen["ignore"] = ignored
        if self._routing.sort != "balanced":
            chosen["sort"] = self._routing.sort
        return chosen

    def build_body(self, request: ChatRequest, routing: JsonObject) -> bytes:
        """Return the body. Its bytes are the response cache's key, so order and spelling never vary."""
        sampling = request.sampling
        body: JsonObject = {
            "model": self._model,
            "messages": list(request.messages),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed + request.replica
        if request.tools:
            body["tools"] = list(request.tools)
        if sampling.reasoning is not None:
            body["reasoning"] = sampling.reasoning.model_dump(exclude_none=True)
        if self._stream:
            body["stream"] = True
        if request.replica:
            body["metadata"] = {"replica": str(request.replica)}
        # On by default for short contexts, this would remove the middle of a prompt without a word.
        body["plugins"] = [{"id": "context-compression", "enabled": False}]
        body["provider"] = routing
        return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()

    async def complete(
        self, body: bytes, *, deadline_s: float, refresh: bool = False, on_accepted: OnAccepted | None = None
    ) -> RawReply:
        """Send one request; see `ChatProvider.complete`."""
        headers = {"x-openrouter-cache-clear": "true"} if refresh else None
        return await self._connection.post(
            "chat/completions", body, deadline_s=deadline_s, headers=headers, on_accepted=on_accepted
        )

    async def find_generation(self, generation_id: str) -> GenerationRecord | None:
        """Return what a generation cost; None while it is not listed yet."""
        found = await self._connection.get_json("generation", {"id": generation_id}, allow_404=True)
        if found is None:
            return None
        data = _mapping(found.get("data"))
        cost = _decimal(data.get("total_cost"))
        if cost is None:
            raise ProviderError(f"generation {generation_id!r} is listed without total_cost")
        reasoning = data.get("native_tokens_reasoning")
        return GenerationRecord(
            generation_id=generation_id,
            cost_usd=money(cost),
            prompt_tokens=int(data.get("native_tokens_prompt") or 0),
            completion_tokens=int(data.get("native_tokens_completion") or 0),
            reasoning_tokens=int(reasoning) if reasoning is not None else None,
            provider=data.get("provider_name"),
        )

    async def account(self) -> AccountUsage | None:
        """Return the key's usage. The account's balance is not visible to an inference key."""
        found = await self._connection.get_json("key")
        data = _mapping((found or {}).get("data"))
        usage = _decimal(data.get("usage"))
        if usage is None:
            raise ProviderError("GET 'key' named no usage")
        budget = _mapping(data.get("effective_budget"))
        limits = [_decimal(budget.get("remaining_usd")), _decimal(data.get("limit_remaining"))]
        known = [limit for limit in limits if limit is not None]
        return AccountUsage(
            key_label=str(data.get("label") or ""),
            usage_usd=money(usage),
            remaining_usd=min(known) if known else None,
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._connection.aclose()


def _endpoint(entry: JsonObject) -> Endpoint:
    pricing = _mapping(entry.get("pricing"))
    tiers = [pricing]
    overrides = [_mapping(entry) for entry in cast("list[Any]", pricing.get("overrides") or [])]
    tiers += [{**override, **_mapping(override.get("prices") or override.get("pricing"))} for override in overrides]
    dearest = {
        name: max((_decimal(tier.get(name)) or Decimal(0) for tier in tiers), default=Decimal(0)) for name in _PRICED
    }
    uptime = entry.get("uptime_last_30m")
    return Endpoint(
        provider=str(entry.get("provider_name") or ""),
        tag=str(entry.get("tag") or entry.get("provider_name") or ""),
        quantization=entry.get("quantization"),
        prompt_usd=dearest["prompt"],
        completion_usd=dearest["completion"],
        request_usd=dearest["request"],
        context_length=entry.get("context_length"),
        max_completion_tokens=entry.get("max_completion_tokens"),
        supported_parameters=tuple(entry.get("supported_parameters") or ()),
        status=int(entry.get("status") or 0),
        uptime_30m=float(uptime) if uptime is not None else None,
    )


def _mapping(value: Any) -> JsonObject:
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def _decimal(value: Any) -> Decimal | None:
    """Return a price or amount exactly as it was spelled; None when there is none."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return Decimal(str(value))
    except InvalidOperation:
        return None
