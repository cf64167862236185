"""One body of tests over every provider and way of receiving, each against a loopback server of its protocol.

The servers answer in the recorded shapes: OpenRouter's with padding before the JSON or comments between events,
SGLang's `/generate` with `output_ids` that end with the stop token.
"""

import asyncio
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from eagle3.providers.base import ChatProvider, ChatRequest, PriceCap
from eagle3.providers.classify import Billing, Verdict, classify
from eagle3.providers.connection import ApiKey
from eagle3.providers.openai_compatible import OpenAICompatibleProvider
from eagle3.providers.openrouter import OpenRouterProvider
from eagle3.providers.sglang import SGLangProvider
from eagle3.recipe import Reasoning, Routing, Sampling
from eagle3.records import JsonObject
from tests.contract.test_providers import head_of, read_request, serving

PROMPT_IDS = [11, 12, 13]
OUTPUT_IDS = [21, 22, 23, 2]
STOP_ID = 2
PADDING = b"\n         \n" * 3


def openrouter(url: str, *, stream: bool = False) -> OpenRouterProvider:
    key = ApiKey("k")
    return OpenRouterProvider(base_url=url, key=key, model="m/m", routing=Routing(), response_cache=True, stream=stream)


def openai(url: str, *, stream: bool = False) -> OpenAICompatibleProvider:
    return OpenAICompatibleProvider(
        base_url=url,
        key=None,
        model="m/m",
        return_token_ids=True,
        prompt_price_usd_per_mtok=Decimal(0),
        completion_price_usd_per_mtok=Decimal(0),
        stream=stream,
    )


def sglang(url: str) -> SGLangProvider:
    return SGLangProvider(
        base_url=url,
        key=None,
        render_ids=lambda messages, tools: list(PROMPT_IDS),
        stop_ids=[STOP_ID],
        prompt_price_usd_per_mtok=Decimal(0),
        completion_price_usd_per_mtok=Decimal(0),
    )


CASES: list[tuple[Callable[[str], ChatProvider], bool]] = [
    (openrouter, False),
    (lambda url: openrouter(url, stream=True), False),
    (openai, True),
    (lambda url: openai(url, stream=True), True),
    (sglang, True),
]
NAMES = ["openrouter", "openrouter streamed", "openai", "openai streamed", "sglang"]
EVERY = pytest.mark.parametrize(("make", "gives_ids"), CASES, ids=NAMES)


def chat_reply(asked: JsonObject, limit: int) -> bytes:
    """The reply of a chat server: whole, or streamed with the usage in an event of its own."""
    finish = "length" if limit < len(OUTPUT_IDS) else "stop"
    usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": min(limit, len(OUTPUT_IDS)), "cost": 0.0001}
    base = {"id": "gen-1", "model": "m/m-0127", "provider": "Chutes"}
    ids = {"token_ids": OUTPUT_IDS[:limit]} if asked.get("return_token_ids") else {}
    prompt = {"prompt_token_ids": PROMPT_IDS} if ids else {}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": " Oi!\n", "reasoning": " The user"}
        choice = {"index": 0, "message": message, "finish_reason": finish, **ids}
        return PADDING + json.dumps({**base, **prompt, "choices": [choice], "usage": usage}).encode()
    deltas = [{"reasoning": " The"}, {"reasoning": " user", "content": ""}, {"content": " Oi"}, {"content": "!\n"}]
    events = [{**base, **prompt, "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({**base, "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": finish, **ids}]})
    events.append({**base, "choices": [], "usage": usage})
    lines = [": OPENROUTER PROCESSING", *(f"data: {json.dumps(event)}" for event in events), "data: [DONE]", ""]
    return "\n\n".join(lines).encode()


def generate_reply(asked: JsonObject, limit: int) -> bytes:
    """The reply of SGLang's `/generate`."""
    assert asked["input_ids"] == PROMPT_IDS
    assert asked["sampling_params"]["stop_token_ids"] == [STOP_ID]
    kept = OUTPUT_IDS[:limit]
    finish: JsonObject = {"type": "stop", "matched": STOP_ID}
    if kept[-1] != STOP_ID:
        finish = {"type": "length", "length": limit}
    meta = {"id": "r1", "finish_reason": finish, "prompt_tokens": len(PROMPT_IDS), "completion_tokens": len(kept)}
    return json.dumps({"text": " The user</think> Oi!\n", "output_ids": kept, "meta_info": meta}).encode()


async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speak all three protocols, by path."""
    while True:
        head, body = await read_request(reader)
        path = head.split(b" ", 2)[1].decode()
        if path.endswith(("/models", "/get_model_info")):
            reply = b'{"data": [], "model_path": "m"}'
        elif path.endswith("/generate"):
            asked = json.loads(body)
            reply = generate_reply(asked, asked["sampling_params"]["max_new_tokens"])
        else:
            assert path.endswith("/chat/completions")
            asked = json.loads(body)
            reply = chat_reply(asked, asked["max_tokens"])
        writer.write(head_of(len(reply)) + reply)
        await writer.drain()


async def ask(provider: ChatProvider, max_tokens: int = 50) -> Any:
    cap = PriceCap(prompt_usd=Decimal("0.0000006"), completion_usd=Decimal("0.000003"))
    asked = ChatRequest(
        messages=[{"role": "user", "content": "hi"}], tools=(), sampling=Sampling(max_tokens=max_tokens), replica=0
    )
    try:
        return classify(
            await provider.complete(provider.build_body(asked, provider.routing(["c/x"], cap, [])), deadline_s=10)
        )
    finally:
        await provider.aclose()


@EVERY
def test_an_answer_arrives_whole(make, gives_ids):
    async def work() -> None:
        async with serving(server) as url:
            outcome = await ask(make(url))
        assert (outcome.verdict, outcome.billing) == (Verdict.ANSWERED, Billing.REPORTED), outcome
        answer = outcome.parsed.answer
        assert answer.finish_reason == "stop"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
        if make is sglang:
            assert answer.content == " The user</think> Oi!\n"
        else:
            assert (answer.reasoning, answer.content) == (" The user", " Oi!\n")
            assert answer.cost_usd == Decimal("0.0001")
        assert answer.completion_token_ids == (tuple(OUTPUT_IDS) if gives_ids else None)

    asyncio.run(work())


@EVERY
def test_a_cut_by_length_is_told(make, gives_ids):
    async def work() -> None:
        async with serving(server) as url:
            outcome = await ask(make(url), max_tokens=2)
        assert outcome.verdict is Verdict.ANSWERED
        assert outcome.parsed.answer.finish_reason == "length"
        if gives_ids:
            assert outcome.parsed.answer.completion_token_ids == tuple(OUTPUT_IDS[:2])

    asyncio.run(work())


@EVERY
def test_a_reply_cut_anywhere_is_no_answer(make, gives_ids):
    """The length of the body is true, its end is missing: a proxy died on the way."""
    del gives_ids
    shares = [0.3, 0.7, 0.97]

    async def cutting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await read_request(reader)
            asked = json.loads(body)
            whole = generate_reply(asked, 50) if b"/generate" in head else chat_reply(asked, 50)
            reply = whole[: int(len(whole) * shares.pop())]
            writer.write(head_of(len(reply)) + reply)
            await writer.drain()

    async def work() -> None:
        async with serving(cutting) as url:
            while shares:
                outcome = await ask(make(url))
                assert (outcome.verdict, outcome.billing) == (Verdict.AMBIGUOUS, Billing.UNKNOWN), outcome

    asyncio.run(work())


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ({"error": {"message": "The input is longer than the context", "code": 400}}, Verdict.SAMPLE_REJECTED),
        ({"object": "error", "message": "overloaded", "code": 503}, Verdict.RETRY),
        (
            {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "gone"}}},
            Verdict.RETRY,
        ),
        ({"text": "x", "output_ids": [1]}, Verdict.AMBIGUOUS),
    ],
)
def test_sglang_errors_keep_their_meaning(body, verdict):
    async def refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            reply = json.dumps(body).encode()
            writer.write(head_of(len(reply)) + reply)
            await writer.drain()

    async def work() -> None:
        async with serving(refusing) as url:
            assert (await ask(sglang(url))).verdict is verdict

    asyncio.run(work())


def test_servers_say_whether_they_are_there():
    async def work() -> None:
        async with serving(server) as url:
            for make in (openai, sglang):
                provider = make(url)
                (endpoint,) = await provider.list_endpoints()
                assert endpoint.provider == "127.0.0.1"
                await provider.aclose()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("reasoning", "sent"),
    [
        (Reasoning(enabled=False), {"enabled": False}),
        (Reasoning(effort="high"), {"effort": "high"}),
        (Reasoning(enabled=True, max_tokens=500), {"enabled": True, "max_tokens": 500}),
    ],
)
def test_thinking_is_asked_for_and_never_excluded(reasoning, sent):
    async def work() -> None:
        provider = openrouter("http://127.0.0.1:9/v1")
        sampling = Sampling(max_tokens=1000, reasoning=reasoning)
        asked = ChatRequest(messages=[{"role": "user", "content": "x"}], tools=(), sampling=sampling, replica=0)
        assert json.loads(provider.build_body(asked, {}))["reasoning"] == sent
        await provider.aclose()

    asyncio.run(work())
