"""A scripted OpenRouter, faked at the wire, that keeps true books; and one process of generation against it."""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx

from eagle3.errors import Eagle3Error, StoppedError
from eagle3.generation.engine import Engine
from eagle3.generation.history import History, replay
from eagle3.generation.journal import Journal
from eagle3.generation.journal_lines import journal_paths
from eagle3.generation.ledger import Ledger
from eagle3.generation.pacing import RetryBudget
from eagle3.generation.requests import Plan
from eagle3.providers.base import Endpoint
from eagle3.providers.connection import ApiKey
from eagle3.providers.openrouter import OpenRouterProvider
from eagle3.providers.policy import select
from eagle3.recipe import Generation, Routing, Sampling
from eagle3.records import PromptRecord, sample_id_of

MICRO = Decimal("1e-6")
ENDPOINT = Endpoint(
    provider="Chutes", tag="chutes/int4", quantization="int4", prompt_usd=MICRO, completion_usd=2 * MICRO
)
MAX_TOKENS = 50
PROMPT_TOKENS = 10


class World:
    """An OpenRouter that does what its script says for each request of a prompt, keeps true books, and caches."""

    def __init__(self, script: dict[str, Sequence[str]]) -> None:
        self.script = {prompt: list(kinds) for prompt, kinds in script.items()}
        self.bill = Decimal(0)
        self.foreign = Decimal(0)
        """The part of the bill that the run under test has nothing to do with."""
        self.generations: dict[str, dict[str, Any]] = {}
        self.cache: dict[str, tuple[str, bytes]] = {}
        self.bought: Counter[str] = Counter()
        """By prompt: finished answers that were billed, delivered or not."""
        self.requests: list[tuple[str, bytes, httpx.Headers]] = []
        self.crash_after: int | None = None
        """Number of the request at which the process dies."""
        self.crash = asyncio.Event()
        self.running: dict[str, tuple[str, str]] = {}
        """Generations that have begun and not ended: prompt and digest of the request."""
        self.looks_until_end = 3
        self.requests_until_end = 0
        """A running generation has ended after so many look-ups and so many requests."""
        self.asked_while_running: list[str] = []
        """Prompts asked again while the first request ran: each is a second bill."""
        self.root = Path()
        """Where the last process keeps its journal."""
        self.retries: RetryBudget | None = None
        """Of the last process."""

    def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith("/key"):
            return httpx.Response(200, json={"data": {"label": "key", "usage": float(self.bill)}})
        if path.endswith("/generation"):
            name = request.url.params["id"]
            if name in self.running:
                self.looks_until_end -= 1
                if self.looks_until_end <= 0 and len(self.requests) >= self.requests_until_end:
                    self.end(name)
            found = self.generations.get(name)
            return (
                httpx.Response(200, json={"data": found})
                if found
                else httpx.Response(404, json={"error": {"code": 404}})
            )
        prompt = json.loads(request.content)["messages"][0]["content"]
        self.requests.append((prompt, request.content, request.headers))
        if self.crash_after is not None and len(self.requests) >= self.crash_after:
            self.crash.set()
        digest = hashlib.sha256(request.content).hexdigest()
        if request.headers.get("x-openrouter-cache-clear"):
            self.cache.pop(digest, None)
        if any(digest == other for _, other in self.running.values()):
            self.asked_while_running.append(prompt)
        if digest in self.cache:
            source, body = self.cache[digest]
            return self.reply(
                body,
                f"hit-{len(self.requests)}",
                {"x-openrouter-cache-status": "HIT", "x-openrouter-cache-source-id": source},
            )
        kinds = self.script.get(prompt) or ["ok"]
        return self.act(kinds.pop(0) if kinds else "ok", prompt, digest)

    def reply(self, body: bytes, generation_id: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return httpx.Response(200, content=body, headers={"x-generation-id": generation_id, **(headers or {})})

    def act(self, kind: str, prompt: str, digest: str) -> httpx.Response:
        name = f"gen-{len(self.requests)}"
        if kind.isdigit():
            return httpx.Response(int(kind), json={"error": {"code": int(kind), "message": "scripted"}})
        if kind == "budget":
            message = "Key limit exceeded (total limit)"
            return httpx.Response(403, json={"error": {"code": 403, "message": message}})
        if kind == "502 billed":
            self.charge(name, 7)
            return httpx.Response(502, json={"error": {"code": 502}}, headers={"x-generation-id": name})
        if kind == "dropped":
            raise httpx.ReadError("scripted")
        if kind in ("slow", "silent"):
            self.running[name] = (prompt, digest)
            headers = {"x-generation-id": name} if kind == "slow" else {}
            return httpx.Response(200, headers=headers, stream=_Endless(self, is_named=kind == "slow"))
        return self.answer(kind, name, prompt, digest)

    def end(self, name: str) -> None:
        """A running generation ends: it is billed, listed and cached, although nobody reads it."""
        self.answer("ok", name, *self.running.pop(name))

    def answer(self, kind: str, name: str, prompt: str, digest: str) -> httpx.Response:
        if kind not in ("empty", "unfinished"):
            self.bought[prompt] += 1
        tokens = 0 if kind == "empty" else 1 + len(prompt) % 40
        cost = self.charge(name, tokens, is_dear=kind == "dear")
        usage: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "cost": float(cost)}
        if kind in ("null cost", "unlisted"):
            del usage["cost"]
        if kind == "unlisted":
            del self.generations[name]
        choice: dict[str, Any] = {"message": {"content": f"about {prompt}"}, "finish_reason": "stop"}
        if kind == "empty":
            choice["message"]["content"] = ""
        if kind == "unfinished":
            choice["finish_reason"] = "network_error"
        provider = "Stranger" if kind == "stranger" else "Chutes"
        body = json.dumps(
            {"id": name, "model": "m", "provider": provider, "choices": [choice], "usage": usage}
        ).encode()
        zero = {**usage, "prompt_tokens": 0, "completion_tokens": 0, "cost": 0}
        cached = json.dumps(
            {"id": name, "model": "m", "provider": provider, "choices": [choice], "usage": zero}
        ).encode()
        self.cache[digest] = (name, cached)
        if kind == "timeout":
            raise httpx.ReadTimeout("scripted")
        if kind == "lost":
            raise httpx.RemoteProtocolError("scripted")
        if kind == "padding":
            return self.reply(b"\n         \n", name)
        if kind == "cut":
            return self.reply(body[: len(body) // 2], name)
        return self.reply(b"\n         \n" + body, name)

    def charge(self, name: str, tokens: int, *, is_dear: bool = False) -> Decimal:
        """Bill a generation: at the endpoint's dearest tier, or at half of it, its usual price."""
        cost = PROMPT_TOKENS * ENDPOINT.prompt_usd + tokens * ENDPOINT.completion_usd
        cost = cost if is_dear else cost / 2
        self.bill += cost
        self.generations[name] = {
            "total_cost": float(cost),
            "native_tokens_prompt": PROMPT_TOKENS,
            "native_tokens_completion": tokens,
            "provider_name": "Chutes",
        }
        return cost


class _Endless(httpx.AsyncByteStream):
    """A reply of which only headers and padding come before the process dies."""

    def __init__(self, world: World, *, is_named: bool) -> None:
        self._world = world
        self._is_named = is_named

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"\n         \n"
        while self._is_named and not self._is_noted():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.001)
        self._world.crash.set()
        await asyncio.Event().wait()

    def _is_noted(self) -> bool:
        return any(b'"accepted"' in path.read_bytes() for path in journal_paths(self._world.root / "d"))


def prompts_of(names: Sequence[str]) -> list[PromptRecord]:
    records: list[PromptRecord] = []
    for name in names:
        messages = ({"role": "user", "content": name},)
        records.append(
            PromptRecord(sample_id=sample_id_of("d", messages, (), 0), dataset="d", prompt_id=name, messages=messages)
        )
    return records


async def buy(
    world: World,
    root: Path,
    budget: Decimal = Decimal(1),
    token_caps: dict[str, int] | None = None,
    *,
    answers_outlive_us: bool = False,
    **changes: Any,
) -> tuple[History, Ledger, Eagle3Error | None]:
    """Run one process's worth of generation over the world's prompts; it may die on the way."""
    world.crash, world.root = asyncio.Event(), root
    section = {"kind": "openrouter", "model": "m/m"}
    generation = Generation.model_validate({"provider": section, "budget_usd": str(budget), "in_flight": 8, **changes})
    transport = httpx.MockTransport(world.handle)
    provider = OpenRouterProvider(
        base_url="http://x/v1",
        key=ApiKey("k"),
        model="m/m",
        routing=Routing(),
        response_cache=True,
        usage_lag_s=0.0,
        answers_outlive_us=answers_outlive_us,
        transport=transport,
    )
    selection = select([ENDPOINT], Routing(), model="m/m", max_tokens=MAX_TOKENS)
    history, ledger = replay(root, ["d"], budget)
    journal = Journal(root, window_s=0.0)
    engine = Engine(
        provider=provider,
        endpoints=[ENDPOINT],
        plan_of=lambda prompt: Plan(
            dataset="d", sampling=Sampling(max_tokens=MAX_TOKENS), selection=selection, cap=selection.cap
        ),
        journal=journal,
        history=history,
        ledger=ledger,
        settings=generation,
        template_options={},
        longest_answer_tokens=MAX_TOKENS,
        token_caps=token_caps,
    )
    world.retries = engine.retries
    prompts = prompts_of(list(world.script))
    error: Eagle3Error | None = None
    await engine.start()
    buying = asyncio.create_task(engine.buy_shard(prompts, range(len(prompts)), [PROMPT_TOKENS] * len(prompts)))
    dying = asyncio.create_task(world.crash.wait())
    await asyncio.wait({buying, dying}, return_when=asyncio.FIRST_COMPLETED)
    if dying.done():
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await journal.aclose()
        await provider.aclose()
        return history, ledger, StoppedError("the process died")
    dying.cancel()
    try:
        await buying
    except Eagle3Error as exc:
        error = exc
    before = (ledger.spent_usd, ledger.held_usd)
    assert world.bill - world.foreign <= ledger.spent_usd + ledger.held_usd + Decimal("2e-9")
    assert ledger.spent_usd + ledger.held_usd <= budget
    await engine.finish()
    await journal.aclose()
    await provider.aclose()
    again_history, again_ledger = replay(root, ["d"], budget)
    assert (again_ledger.spent_usd, again_ledger.held_usd) == (ledger.spent_usd, ledger.held_usd), before
    assert again_history.by_dataset == history.by_dataset
    assert again_history.by_provider == history.by_provider
    return history, ledger, error
