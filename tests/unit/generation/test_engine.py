"""The engine against a scripted provider, faked at the wire: what it buys, what it pays, what it writes down."""

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.errors import BudgetReachedError, CredentialsError, CreditsExhaustedError, Eagle3Error, RunRejectedError
from eagle3.generation import engine as engine_module
from eagle3.generation import settlement as settlement_module
from eagle3.generation.engine import Engine
from eagle3.generation.history import History, replay
from eagle3.generation.journal import Journal
from eagle3.generation.ledger import Ledger
from eagle3.generation.requests import Plan
from eagle3.providers.base import Endpoint
from eagle3.providers.connection import ApiKey
from eagle3.providers.openrouter import OpenRouterProvider
from eagle3.providers.policy import select
from eagle3.recipe import Generation, Routing, Sampling
from eagle3.records import FailureClass, PromptRecord, sample_id_of

MICRO = Decimal("1e-6")
ENDPOINT = Endpoint(
    provider="Chutes", tag="chutes/int4", quantization="int4", prompt_usd=MICRO, completion_usd=2 * MICRO
)
MAX_TOKENS = 50
PROMPT_TOKENS = 10


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(engine_module, "FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr(engine_module, "PUMP_S", 0.001)
    monkeypatch.setattr(settlement_module, "LOOKUP_WAITS_S", (0.0,))


class World:
    """An OpenRouter that does what its script says for each request of a prompt, keeps true books, and caches."""

    def __init__(self, script: dict[str, Sequence[str]]) -> None:
        self.script = {prompt: list(kinds) for prompt, kinds in script.items()}
        self.bill = Decimal(0)
        self.foreign = Decimal(0)
        """The part of the bill that the run under test has nothing to do with."""
        self.generations: dict[str, dict[str, Any]] = {}
        self.cache: dict[str, tuple[str, bytes]] = {}
        self.requests: list[tuple[str, bytes, httpx.Headers]] = []

    def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith("/key"):
            return httpx.Response(200, json={"data": {"label": "key", "usage": float(self.bill)}})
        if path.endswith("/generation"):
            found = self.generations.get(request.url.params["id"])
            return (
                httpx.Response(200, json={"data": found})
                if found
                else httpx.Response(404, json={"error": {"code": 404}})
            )
        prompt = json.loads(request.content)["messages"][0]["content"]
        self.requests.append((prompt, request.content, request.headers))
        digest = hashlib.sha256(request.content).hexdigest()
        if request.headers.get("x-openrouter-cache-clear"):
            self.cache.pop(digest, None)
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
        if kind == "502 billed":
            self.charge(name, 7)
            return httpx.Response(502, json={"error": {"code": 502}}, headers={"x-generation-id": name})
        if kind == "dropped":
            raise httpx.ReadError("scripted")
        tokens = 0 if kind == "empty" else 1 + len(prompt) % 40
        cost = self.charge(name, tokens)
        usage: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "cost": float(cost)}
        if kind == "null cost":
            del usage["cost"]
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
        if kind == "lost":
            raise httpx.RemoteProtocolError("scripted")
        if kind == "padding":
            return self.reply(b"\n         \n", name)
        if kind == "cut":
            return self.reply(body[: len(body) // 2], name)
        return self.reply(b"\n         \n" + body, name)

    def charge(self, name: str, tokens: int) -> Decimal:
        cost = PROMPT_TOKENS * ENDPOINT.prompt_usd + tokens * ENDPOINT.completion_usd
        self.bill += cost
        self.generations[name] = {
            "total_cost": float(cost),
            "native_tokens_prompt": PROMPT_TOKENS,
            "native_tokens_completion": tokens,
            "provider_name": "Chutes",
        }
        return cost


def prompts_of(names: Sequence[str]) -> list[PromptRecord]:
    records: list[PromptRecord] = []
    for name in names:
        messages = ({"role": "user", "content": name},)
        records.append(
            PromptRecord(sample_id=sample_id_of("d", messages, (), 0), dataset="d", prompt_id=name, messages=messages)
        )
    return records


async def buy(
    world: World, root: Path, budget: Decimal = Decimal(1), **changes: Any
) -> tuple[History, Ledger, Eagle3Error | None]:
    """Run one process's worth of generation over the world's prompts."""
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
        answers_outlive_us=False,
        transport=transport,
    )
    selection = select([ENDPOINT], Routing(), model="m/m", max_tokens=MAX_TOKENS)
    history, ledger = replay(root, ["d"], budget)
    journal = Journal(root, window_s=0.0)
    engine = Engine(
        provider=provider,
        endpoints=[ENDPOINT],
        plan_of=lambda prompt: Plan(dataset="d", sampling=Sampling(max_tokens=MAX_TOKENS), selection=selection),
        journal=journal,
        history=history,
        ledger=ledger,
        settings=generation,
        template_options={},
        longest_answer_tokens=MAX_TOKENS,
    )
    prompts = prompts_of(list(world.script))
    error: Eagle3Error | None = None
    await engine.start()
    try:
        await engine.buy_shard(prompts, range(len(prompts)), [PROMPT_TOKENS] * len(prompts))
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


FINE = ["ok", "null cost"]
BILLED = ["lost", "padding", "cut", "502 billed", "empty", "unfinished"]
FREE = ["dropped", "502", "503", "429", "500", "408"]
KINDS = [*FINE, *BILLED, *FREE]
SCRIPTS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=6), st.lists(st.sampled_from(KINDS), max_size=7), min_size=1, max_size=8
)


@settings(max_examples=120)
@given(SCRIPTS, st.sampled_from([Decimal("0.0004"), Decimal(1)]))
def test_the_bill_is_covered_at_all_times_and_known_at_the_end(script, budget):
    with tempfile.TemporaryDirectory() as folder:
        world = World(script)
        history, ledger, error = asyncio.run(buy(world, Path(folder), budget))
        assert world.bill <= budget
        assert abs(ledger.spent_usd - world.bill) <= Decimal("1e-8")
        assert ledger.held_usd == 0
        finals = [history.sample(prompt.sample_id).is_final for prompt in prompts_of(list(script))]
        assert all(finals) if error is None else isinstance(error, BudgetReachedError)


@pytest.mark.parametrize("kind", ["lost", "padding", "cut"])
def test_a_lost_reply_is_fetched_from_the_cache_and_paid_once(tmp_path, kind):
    world = World({"a": [kind]})
    history, ledger, error = asyncio.run(buy(world, tmp_path))
    assert error is None
    assert ledger.spent_usd == world.bill
    first, second = (body for _, body, _ in world.requests)
    assert first == second
    sample = history.sample(prompts_of(["a"])[0].sample_id)
    assert sample.answer is not None
    entry = sample.answer.read()
    assert entry["from_cache"]
    assert Decimal(entry["cost_usd"]) == world.bill
    assert entry["usage"]["completion_tokens"] > 0


def test_a_worthless_reply_is_not_fetched_from_the_cache_again(tmp_path):
    world = World({"a": ["empty", "ok"]})
    history, _, _ = asyncio.run(buy(world, tmp_path))
    assert [headers.get("x-openrouter-cache-clear") for _, _, headers in world.requests] == [None, "true"]
    assert history.sample(prompts_of(["a"])[0].sample_id).answer is not None


def test_refusals_by_rate_limit_are_no_attempts(tmp_path):
    world = World({"a": ["429"] * 20})
    history, _, error = asyncio.run(buy(world, tmp_path, max_attempts=1))
    assert error is None
    assert history.sample(prompts_of(["a"])[0].sample_id).attempts == 1


@pytest.mark.parametrize(
    ("kinds", "failure"),
    [
        (["500"] * 9, FailureClass.RETRIES_EXHAUSTED),
        (["dropped"] * 9, FailureClass.AMBIGUOUS),
        (["empty"] * 9, FailureClass.EMPTY),
        (["unfinished"] * 9, FailureClass.MALFORMED),
        (["400"], FailureClass.REJECTED),
    ],
)
def test_a_sample_that_never_works_becomes_a_counted_result(tmp_path, kinds, failure):
    world = World({"a": kinds, "b": ["ok"]})
    history, _, error = asyncio.run(buy(world, tmp_path, max_attempts=4))
    assert error is None
    found = history.sample(prompts_of(["a"])[0].sample_id).failure
    assert found is not None
    assert found.failure is failure
    assert history.by_dataset["d"].failed == 1
    assert history.by_dataset["d"].samples == 1


@pytest.mark.parametrize(
    ("kind", "error_class"),
    [
        ("402", CreditsExhaustedError),
        ("401", CredentialsError),
        ("404", RunRejectedError),
        ("stranger", RunRejectedError),
    ],
)
def test_what_concerns_all_requests_ends_the_run_and_keeps_the_rest(tmp_path, kind, error_class):
    names = [f"p{number}" for number in range(30)]
    world = World({name: [kind] if name == "p5" else ["ok"] for name in names})
    _, _, error = asyncio.run(buy(world, tmp_path))
    assert isinstance(error, error_class)
    world.script = {name: ["ok"] for name in names}
    world.cache.clear()
    history, _, error = asyncio.run(buy(world, tmp_path))
    assert error is None
    assert history.by_dataset["d"].samples == 30
    assert len({body for _, body, _ in world.requests}) == 30


def test_a_wrong_recipe_is_noticed_after_some_rejections(tmp_path):
    world = World({f"p{number}": ["400"] for number in range(200)})
    _, _, error = asyncio.run(buy(world, tmp_path))
    assert isinstance(error, RunRejectedError)
    assert len(world.requests) < 100


def test_finished_samples_are_not_asked_again(tmp_path):
    world = World({"a": ["ok"], "b": ["ok"]})
    asyncio.run(buy(world, tmp_path))
    asyncio.run(buy(world, tmp_path))
    assert len(world.requests) == 2


def test_a_cached_answer_that_another_run_paid_for_is_free(tmp_path):
    world = World({"a": ["ok"]})
    asyncio.run(buy(world, tmp_path / "one"))
    bill = world.foreign = world.bill
    history, ledger, _ = asyncio.run(buy(world, tmp_path / "two"))
    assert world.bill == bill
    assert ledger.spent_usd == 0
    assert history.by_dataset["d"].samples == 1


def test_spending_by_others_on_the_key_only_raises_what_we_count(tmp_path):
    world = World({"a": ["ok"]})
    asyncio.run(buy(world, tmp_path))
    own = world.bill
    world.bill += Decimal("0.25")
    _, ledger, _ = asyncio.run(buy(world, tmp_path))
    assert abs(ledger.spent_usd - own - Decimal("0.25")) < Decimal("1e-8")
    assert abs(ledger.unexplained_usd - Decimal("0.25")) < Decimal("1e-8")
