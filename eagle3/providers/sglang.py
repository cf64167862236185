"""SGLang's own `/generate`: rendered ids in, generated ids out. No template, no parser, nothing to reconstruct.

Source: SGLang 0.5.23, `POST /generate`; `output_ids` end with the matched stop token.
"""

import json
from collections.abc import Callable, Sequence
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


class SGLangProvider:
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
        render_ids: Callable[[Sequence[JsonObject], Sequence[JsonObject]], list[int]],
        stop_ids: Sequence[int],
        prompt_price_usd_per_mtok: Decimal,
        completion_price_usd_per_mtok: Decimal,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare a client; nothing is sent.

        Args:
            base_url: Root of the server.
            key: Bearer token of a server that wants one.
            render_ids: Messages and tools to the ids of the prompt, by the target's own template.
            stop_ids: Ids that end an answer.
            prompt_price_usd_per_mtok: What a million prompt tokens cost us.
            completion_price_usd_per_mtok: The same for answers.
            transport: For tests.
        """
        self._connection = Connection(base_url, key, {}, transport)
        self._render_ids = render_ids
        self._stop_ids = list(stop_ids)
        self._prices = (prompt_price_usd_per_mtok / _MTOK, completion_price_usd_per_mtok / _MTOK)

    @property
    def name(self) -> str:
        """Host name of the server."""
        return self._connection.host

    async def list_endpoints(self) -> Sequence[Endpoint]:
        """Return the one endpoint, after asking the server whether it is there."""
        await self._connection.get_json("get_model_info")
        prompt_usd, completion_usd = self._prices
        return (
            Endpoint(
                provider=self.name,
                tag=self.name,
                quantization=None,
                prompt_usd=prompt_usd,
                completion_usd=completion_usd,
            ),
        )

    def routing(self, tags: Sequence[str], cap: PriceCap, ignore: Sequence[str]) -> JsonObject:
        """Return nothing: there is one endpoint."""
        del tags, cap, ignore
        return {}

    def build_body(self, request: ChatRequest, routing: JsonObject) -> bytes:
        """Return the body; the prompt goes out as ids, and special tokens stay in the text that comes back."""
        del routing
        sampling = request.sampling
        parameters: JsonObject = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": self._stop_ids,
            "skip_special_tokens": False,
        }
        if sampling.seed is not None:
            parameters["sampling_seed"] = sampling.seed + request.replica
        body = {"input_ids": self._render_ids(request.messages, request.tools), "sampling_params": parameters}
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()

    async def complete(
        self, body: bytes, *, deadline_s: float, refresh: bool = False, on_accepted: OnAccepted | None = None
    ) -> RawReply:
        """Send one request; see `ChatProvider.complete`. Such servers name no generations."""
        del refresh, on_accepted
        return await self._connection.post("generate", body, deadline_s=deadline_s)

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
