"""Transport and providers over real sockets: exact error classes, and one body of tests for every provider."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from decimal import Decimal

import httpx
import pytest

from eagle3.errors import ConfigurationError, CredentialsError, ProviderError
from eagle3.providers.base import ChatProvider, ChatRequest, PriceCap, TransportFailure
from eagle3.providers.classify import Verdict, classify
from eagle3.providers.connection import ApiKey, key_from_environment, raise_descriptor_limit
from eagle3.providers.openai_compatible import OpenAICompatibleProvider
from eagle3.providers.openrouter import OpenRouterProvider
from eagle3.providers.proxied import transport_for
from eagle3.providers.sglang import SGLangProvider
from eagle3.providers.transport import FastTransport
from eagle3.recipe import Routing, Sampling
from eagle3.simulator.process import SimulatorProcess

KEY = "sk-or-v1-planted-secret-0123456789"
OK_BODY = b'{"ok":true}'

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler):
    """Yield the URL of a raw server whose handler sees one connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line), 0)
    return head, await reader.readexactly(length)


def head_of(length: int | None, *lines: str) -> bytes:
    framed = [f"content-length: {length}"] if length is not None else []
    return "\r\n".join(["HTTP/1.1 200 OK", *framed, *lines, "", ""]).encode()


async def fetch(url: str, read_s: float = 5.0, idle_limit_s: float = 75.0) -> bytes:
    timeout = httpx.Timeout(read_s)
    async with httpx.AsyncClient(transport=FastTransport(idle_limit_s=idle_limit_s), timeout=timeout) as client:
        return (await client.post(url, content=b"{}")).content


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await read_request(reader)
        writer.write(head_of(len(OK_BODY)) + OK_BODY)


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.transport.abort()


async def sends_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(head_of(100, "x-generation-id: gen-9") + b'{"half":')
    await writer.drain()


async def stalls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    await asyncio.Event().wait()


async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(head_of(None, "transfer-encoding: chunked", "x-generation-id: gen-9"))
    while True:
        writer.write(b"1\r\n \r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def speaks_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(b"SMTP ready\r\n\r\n")
    await writer.drain()


async def ends_with_the_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(head_of(None, "connection: close") + OK_BODY)
    await writer.drain()


async def pads_in_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + head_of(None, "transfer-encoding: chunked"))
    for piece in (b"\n         \n", OK_BODY):
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
    writer.write(b"0\r\n\r\n")
    await writer.drain()


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (closes, httpx.RemoteProtocolError),
        (resets, (httpx.ReadError, httpx.RemoteProtocolError)),  # a reset may arrive as an end on loopback
        (sends_half, httpx.RemoteProtocolError),
        (stalls, httpx.ReadTimeout),
        (speaks_nonsense, httpx.RemoteProtocolError),
    ],
)
def test_the_transport_raises_httpx_own_classes(handler, expected):
    async def work() -> None:
        async with serving(handler) as url:
            with pytest.raises(expected):
                await fetch(url, read_s=0.3)

    asyncio.run(work())


@pytest.mark.parametrize("handler", [answers, ends_with_the_connection, pads_in_chunks])
def test_the_transport_reads_every_framing(handler):
    async def work() -> None:
        async with serving(handler) as url:
            assert (await fetch(url)).strip() == OK_BODY

    asyncio.run(work())


def test_a_refused_port_is_a_connect_error():
    async def work() -> None:
        async with serving(answers) as url:
            pass
        with pytest.raises(httpx.ConnectError):
            await fetch(url)

    asyncio.run(work())


def test_connections_are_reused_and_old_ones_are_not():
    connections = 0

    async def counting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await answers(reader, writer)

    async def work(idle_limit_s: float) -> None:
        async with (
            serving(counting) as url,
            httpx.AsyncClient(transport=FastTransport(idle_limit_s=idle_limit_s)) as client,
        ):
            for _ in range(5):
                assert (await client.post(url, content=b"{}")).content == OK_BODY

    asyncio.run(work(75.0))
    assert connections == 1
    asyncio.run(work(-1.0))
    assert connections == 6


def test_many_at_once_each_get_their_own_reply():
    async def echoes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await read_request(reader)
            await asyncio.sleep(0)
            writer.write(head_of(len(body)) + body)

    async def work() -> None:
        async with serving(echoes) as url, httpx.AsyncClient(transport=FastTransport()) as client:
            wanted = [b"%d" % number for number in range(200)]
            replies = await asyncio.gather(*(client.post(url, content=body) for body in wanted))
            assert [reply.content for reply in replies] == wanted

    asyncio.run(work())


def test_a_proxy_of_the_environment_is_used_and_can_be_bypassed(monkeypatch):
    lines: list[bytes] = []

    async def proxies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await read_request(reader)
            lines.append(head.split(b"\r\n", 1)[0])
            writer.write(head_of(len(body)) + body)

    async def work() -> None:
        async with serving(proxies) as proxy:
            monkeypatch.setenv("http_proxy", proxy.removesuffix("/v1"))
            monkeypatch.setenv("no_proxy", "bypassed.example")
            assert isinstance(transport_for(httpx.URL("http://bypassed.example/v1")), FastTransport)
            async with httpx.AsyncClient(transport=transport_for(httpx.URL("http://far.example/v1"))) as client:
                bodies = [b"%d" % number for number in range(20)]
                replies = await asyncio.gather(*(client.post("http://far.example/v1", content=body) for body in bodies))
                assert [reply.content for reply in replies] == bodies
                await client.post("http://far.example/v1", content=b"{}")

    asyncio.run(work())
    assert set(lines) == {b"POST http://far.example/v1 HTTP/1.1"}


def openrouter(url: str, transport: httpx.AsyncBaseTransport | None = None) -> OpenRouterProvider:
    return OpenRouterProvider(
        base_url=url,
        key=ApiKey(KEY),
        model="moonshotai/kimi-k2.5",
        routing=Routing(ignore=("fireworks",)),
        response_cache=True,
        transport=transport,
    )


def openai(url: str, transport: httpx.AsyncBaseTransport | None = None) -> OpenAICompatibleProvider:
    return OpenAICompatibleProvider(
        base_url=url,
        key=ApiKey(KEY),
        model="m",
        return_token_ids=True,
        prompt_price_usd_per_mtok=Decimal(1),
        completion_price_usd_per_mtok=Decimal(2),
        transport=transport,
    )


def sglang(url: str, transport: httpx.AsyncBaseTransport | None = None) -> SGLangProvider:
    return SGLangProvider(
        base_url=url,
        key=ApiKey(KEY),
        render_ids=lambda messages, _: list(messages[-1]["content"].encode()),
        stop_ids=[3, 2],
        prompt_price_usd_per_mtok=Decimal(1),
        completion_price_usd_per_mtok=Decimal(2),
        transport=transport,
    )


PROVIDERS = pytest.mark.parametrize("make", [openrouter, openai, sglang])
CAP = PriceCap(prompt_usd=Decimal("0.0000006"), completion_usd=Decimal("0.000003"))


def request(replica: int = 0, seed: int | None = None) -> ChatRequest:
    sampling = Sampling(max_tokens=77, temperature=0.6, seed=seed)
    return ChatRequest(messages=[{"role": "user", "content": "é"}], tools=(), sampling=sampling, replica=replica)


def body_of(provider: ChatProvider, **changes: int) -> bytes:
    return provider.build_body(request(**changes), provider.routing(["chutes/int4"], CAP, ["together/fp8"]))


@PROVIDERS
def test_bodies_are_stable_and_always_say_max_tokens(make):
    async def work() -> None:
        provider = make("http://127.0.0.1:9/v1")
        body = body_of(provider)
        assert body == body_of(make("http://127.0.0.1:9/v1"))
        document, seeded = json.loads(body), json.loads(body_of(provider, replica=2, seed=7))
        if make is sglang:
            assert document["input_ids"] == list("é".encode())
            document, seeded = document["sampling_params"], seeded["sampling_params"]
            assert (document["max_new_tokens"], document["stop_token_ids"]) == (77, [3, 2])
            assert seeded["sampling_seed"] == 9
        else:
            assert (document["max_tokens"], seeded["seed"]) == (77, 9)
            assert document["messages"] == [{"role": "user", "content": "é"}]
        await provider.aclose()

    asyncio.run(work())


def test_openrouter_bodies_carry_every_fence():
    async def work() -> None:
        provider = openrouter("http://127.0.0.1:9/v1")
        document = json.loads(body_of(provider))
        assert document["plugins"] == [{"id": "context-compression", "enabled": False}]
        chosen = document["provider"]
        assert chosen["max_price"] == {"prompt": 0.6, "completion": 3.0}
        assert "int4" in chosen["quantizations"]
        assert "fp4" not in chosen["quantizations"]
        assert chosen["ignore"] == ["fireworks", "together/fp8"]
        assert chosen["only"] == ["chutes/int4"]
        assert body_of(provider) != body_of(provider, replica=1)
        await provider.aclose()

    asyncio.run(work())


@PROVIDERS
@pytest.mark.parametrize(
    ("handler", "failure"),
    [
        (closes, TransportFailure.CUT),
        (sends_half, TransportFailure.CUT),
        (stalls, TransportFailure.DEADLINE),
        (drips, TransportFailure.DEADLINE),
        (None, TransportFailure.NOT_SENT),
    ],
)
def test_every_provider_tells_how_far_a_request_came(make, handler, failure):
    async def work() -> None:
        async with serving(handler or answers) as url:
            if handler is not None:
                await check(make(url))
        if handler is None:
            await check(make(url))

    async def check(provider: ChatProvider) -> None:
        reply = await provider.complete(b"{}", deadline_s=0.4)
        assert reply.failure is failure
        if handler in (sends_half, drips):
            assert reply.generation_id == "gen-9"
        await provider.aclose()

    asyncio.run(work())


@PROVIDERS
def test_the_key_is_sent_and_shown_nowhere(make):
    seen: list[bytes] = []

    async def echoes_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, _ = await read_request(reader)
            seen.append(head)
            body = json.dumps({"error": {"code": 400, "message": head.decode()}}).encode()
            writer.write(head_of(len(body)) + body)

    async def work() -> None:
        async with serving(echoes_headers) as url:
            provider = make(url)
            reply = await provider.complete(b"{}", deadline_s=5)
            assert KEY not in repr(provider) + repr(vars(provider)) + repr(reply) + repr(classify(reply))
            await provider.aclose()

    asyncio.run(work())
    assert KEY.encode() in seen[0]
    if make is openrouter:
        assert b"x-openrouter-cache: true" in seen[0].lower()


def test_a_missing_key_and_too_few_descriptors_are_told(monkeypatch):
    monkeypatch.delenv("EAGLE3_TEST_KEY", raising=False)
    with pytest.raises(CredentialsError, match="EAGLE3_TEST_KEY"):
        key_from_environment("EAGLE3_TEST_KEY")
    with pytest.raises(ConfigurationError, match="hard limit"):
        raise_descriptor_limit(10**9)


def scripted(status: int, document: object) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: httpx.Response(status, json=document))


def test_lookups_tell_absent_from_broken():
    async def work() -> None:
        absent = openrouter("http://x/v1", scripted(404, {"error": {"code": 404, "message": "not found"}}))
        assert await absent.find_generation("gen-1") is None
        for status, kind in ((401, CredentialsError), (429, ProviderError), (500, ProviderError)):
            with pytest.raises(kind):
                await openrouter("http://x/v1", scripted(status, {"error": {"code": status}})).account()
        found = {"data": {"total_cost": 0.5, "native_tokens_prompt": 3, "native_tokens_completion": 4}}
        record = await openrouter("http://x/v1", scripted(200, found)).find_generation("gen-1")
        assert record is not None
        assert (record.cost_usd, record.prompt_tokens, record.completion_tokens) == (Decimal("0.5"), 3, 4)

    asyncio.run(work())


def test_the_dearest_price_tier_of_an_endpoint_counts():
    entry = {
        "provider_name": "Moonshot AI",
        "tag": "moonshotai/int4",
        "quantization": "int4",
        "pricing": {"prompt": "0.0000006", "completion": "0.000003", "overrides": [{"prompt": "0.000001"}]},
    }

    async def work() -> None:
        provider = openrouter("http://x/v1", scripted(200, {"data": {"endpoints": [entry]}}))
        (endpoint,) = await provider.list_endpoints()
        assert (endpoint.prompt_usd, endpoint.completion_usd) == (Decimal("0.000001"), Decimal("0.000003"))

    asyncio.run(work())


def test_openrouter_against_the_look_alike(project, tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    answer = {
        "messages": messages,
        "prompt_ids": [1, 2],
        "output_ids": [3, 4, 5],
        "text": "yo",
        "finish_reason": "stop",
    }
    (tmp_path / "answers.jsonl").write_text(json.dumps(answer) + "\n", encoding="utf-8")
    scenario = project / "deployments" / "scenarios" / "demo.yaml"
    model = "huggingfacetb/smollm2-135m-instruct"

    async def work(url: str) -> None:
        provider = OpenRouterProvider(
            base_url=url, key=ApiKey("k"), model=model, routing=Routing(), response_cache=True
        )
        endpoints = await provider.list_endpoints()
        assert {endpoint.provider for endpoint in endpoints} == {"Northwind", "Lakeside", "Tidepool"}
        cap = PriceCap(prompt_usd=Decimal(1), completion_usd=Decimal(1))
        asked = ChatRequest(messages=messages, tools=(), sampling=Sampling(max_tokens=16), replica=0)
        body = provider.build_body(asked, provider.routing([entry.tag for entry in endpoints], cap, []))
        before = await provider.account()
        outcomes = [classify(await provider.complete(body, deadline_s=30)) for _ in range(3)]
        assert outcomes[-1].verdict is Verdict.ANSWERED
        again = await provider.complete(body, deadline_s=30)
        assert again.is_cache_hit
        assert again.cache_source_id is not None
        after = await provider.account()
        assert before is not None
        assert after is not None
        assert after.usage_usd > before.usage_usd
        await provider.aclose()

    with SimulatorProcess(scenario, [tmp_path / "answers.jsonl"], time_scale=0.05) as process:
        asyncio.run(work(process.base_url))
