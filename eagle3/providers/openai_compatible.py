"""Any server that speaks the OpenAI chat protocol: SGLang, vLLM and others. Gives native token ids where offered."""

import json
from collections.abc import Sequence
from decimal import Decimal

import httpx

from eagle3.providers.base import (
    AccountUsage,
    ChatRequest,
    Endpoint,
    GenerationRecord,
    OnAccepted,
    PriceCap,
    RawReply,
)
from eagle3.providers.connection import ApiKey, Connection
from eagle3.records import JsonObject

_MTOK = Decimal(1_000_000)


class OpenAICompatibleProvider:
    """One server, one price, no account."""

    usage_lag_s: float | None = None
    names_providers = False
    answers_outlive_us = False
    """A server of one's own bills nothing that a second request would double."""

    def __init__(
        self,
        *,
        base_url: str,
        key: ApiKey | None,
        model: str,
        return_token_ids: bool,
        prompt_price_usd_per_mtok: Decimal,
        completion_price_usd_per_mtok: Decimal,
        stream: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare a client; nothing is sent. `transport` is for tests."""
        self._connection = Connection(base_url, key, {}, transport)
        self._model = model
        self._return_token_ids = return_token_ids
        self._stream = stream
        self._prices = (prompt_price_usd_per_mtok / _MTOK, completion_price_usd_per_mtok / _MTOK)

    @property
    def name(self) -> str:
        """Host name of the server."""
        return self._connection.host

    async def list_endpoints(self) -> Sequence[Endpoint]:
        """Return the one endpoint, after asking the server whether it is there."""
        await self._connection.get_json("models")
        return (
            Endpoint(
                provider=self.name,
                tag=self.name,
                quantization=None,
                prompt_usd=self._prices[0],
                completion_usd=self._prices[1],
            ),
        )

    def routing(self, tags: Sequence[str], cap: PriceCap, ignore: Sequence[str]) -> JsonObject:
        """Return nothing: there is one endpoint."""
        del tags, cap, ignore
        return {}

    def build_body(self, request: ChatRequest, routing: JsonObject) -> bytes:
        """Return the body; the ids are asked for under vLLM's and SGLang's names, servers ignore the other's."""
        del routing
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
        if request.template_options:
            body["chat_template_kwargs"] = dict(request.template_options)
        if self._return_token_ids:
            body["return_token_ids"] = True
        if self._stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()

    async def complete(
        self, body: bytes, *, deadline_s: float, refresh: bool = False, on_accepted: OnAccepted | None = None
    ) -> RawReply:
        """Send one request; see `ChatProvider.complete`. Such servers name no generations."""
        del refresh, on_accepted
        return await self._connection.post("chat/completions", body, deadline_s=deadline_s)

    async def find_generation(self, generation_id: str) -> GenerationRecord | None:
        """Return None: such servers keep no books."""
        del generation_id
        return None

    async def account(self) -> AccountUsage | None:
        """Return None: such servers keep no books."""
        return None

    async def aclose(self) -> None:
        """Close all connections."""
        await self._connection.aclose()
