"""CPU and memory of the whole generation stage, beside its controls in the same run, against one fake server.

    python -m tests.bench.bench_generation [-n 5000] [-c 2000] [--latency-ms 2000] [--tls] [--rounds 3]

Each contestant is a process that asks the same server for the same number of answers. `aiohttp` is the loop that people
write themselves. `fetch` is our client alone. `journaled` adds what every answer needs: the reply is validated and its
raw bytes are synced to the journal. `stage` is everything: intents before and outcomes after each request, ledger,
limiter, Parquet, manifest. `httpx` is httpx's own pool, at fewer connections since it is quadratic. CPU-seconds are
user and system time of the process, import time taken off; memory is the peak of the process, imports included. On a
shared machine compare the ratios, not the seconds; of several rounds, in turns forward and backward, the cheapest of
each counts, and `by_median` holds the ratios of their medians.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httptools
import httpx
import uvloop

from eagle3.artifacts import RunDirectory
from eagle3.generation.collector import rare_collections
from tests.bench import drv_ours

HTTPX_CONNECTIONS = 100
"""Of the control with httpx's own pool; its cost per request grows with this number."""
ANSWER_BYTES = 7000


class _Server(asyncio.Protocol):
    """Answers every request with the same completion after a fixed time."""

    in_flight = 0
    peak = 0
    answered = 0

    def __init__(self, reply: bytes, latency_s: float) -> None:
        self._reply = reply
        self._latency_s = latency_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_complete(self) -> None:
        if self._url.endswith(b"/models"):
            self._write(b'{"data":[]}')
            return
        if self._url.endswith(b"/stats"):
            self._write(json.dumps({"peak": _Server.peak, "answered": _Server.answered}).encode())
            _Server.peak = _Server.answered = 0
            return
        _Server.in_flight += 1
        _Server.peak = max(_Server.peak, _Server.in_flight)
        asyncio.get_running_loop().call_later(self._latency_s, self._answer)

    def _answer(self) -> None:
        _Server.in_flight -= 1
        _Server.answered += 1
        self._write(self._reply)

    def _write(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)  # type: ignore[attr-defined]


async def serve(latency_s: float, certificate: str | None) -> None:
    """Serve until killed."""
    message = {"role": "assistant", "content": "word " * (ANSWER_BYTES // 5)}
    document = {
        "id": "x",
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 180, "completion_tokens": 1400},
    }
    reply = json.dumps(document).encode()
    loop = asyncio.get_running_loop()
    context: ssl.SSLContext | None = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    server = await loop.create_server(lambda: _Server(reply, latency_s), "127.0.0.1", 0, backlog=8192, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def make_certificate(folder: Path) -> Path:
    """Return a file with a key and a certificate for 127.0.0.1."""
    path = folder / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "key.pem"), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes((folder / "key.pem").read_bytes() + path.read_bytes())
    return path


def request_body() -> bytes:
    """Return a request of about 150 words."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 150}]}).encode()


async def many(count: int, connections: int, ask: Callable[[int], Awaitable[Awaitable[object] | None]]) -> None:
    """Ask `count` times, `connections` at once. What `ask` returns is awaited when the next request may go out."""
    turns = asyncio.Semaphore(connections)

    async def turn(number: int) -> None:
        async with turns:
            rest = await ask(number)
        if rest is not None:
            await rest

    await asyncio.gather(*(turn(number) for number in range(count)))


async def ask_aiohttp(url: str, count: int, connections: int) -> None:
    """The control: nothing around the client."""
    import aiohttp

    body = request_body()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def ask(number: int) -> None:
            async with session.post(
                f"{url}/chat/completions", data=body, headers={"content-type": "application/json"}
            ) as reply:
                assert reply.status == 200
                await reply.read()

        await many(count, connections, ask)


async def ask_httpx(url: str, count: int, connections: int) -> None:
    """httpx with its own pool."""
    body = request_body()
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    async with httpx.AsyncClient(limits=limits, timeout=600, trust_env=False) as client:

        async def ask(number: int) -> None:
            reply = await client.post(f"{url}/chat/completions", content=body)
            assert reply.status_code == 200

        await many(count, connections, ask)


async def ask_ours(url: str, count: int, connections: int, folder: Path | None) -> None:
    """Our client; with `folder`, each reply is validated and journaled there."""
    from eagle3.generation.journal import Journal
    from eagle3.generation.journal_lines import Place
    from eagle3.providers.base import RawReply
    from eagle3.providers.classify import Verdict, classify
    from eagle3.providers.connection import Connection

    body = request_body()
    client = Connection(url, None, {})
    journal = Journal(folder) if folder is not None else None

    async def fetch(_number: int) -> None:
        reply = await client.post("chat/completions", body, deadline_s=600)
        assert reply.status == 200

    def keep(number: int, reply: RawReply) -> asyncio.Future[Place]:
        assert journal is not None
        outcome = classify(reply)
        assert outcome.verdict is Verdict.ANSWERED
        entry = {"kind": "answer", "id": number, "generation_id": outcome.generation_id, "reply": reply.body}
        return journal.append_later("race", entry)

    async def fetch_and_keep(number: int) -> asyncio.Future[Place]:
        return keep(number, await client.post("chat/completions", body, deadline_s=600))

    await many(count, connections, fetch if journal is None else fetch_and_keep)
    await client.aclose()
    if journal is not None:
        await journal.aclose()


def cpu_s() -> float:
    """Return user and system seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def contestant(kind: str, url: str, count: int, connections: int) -> None:
    """Run one contestant in this process and print its figures."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "stage":
            from eagle3.generation import generate

            run = RunDirectory(folder / "run")
            drv_ours.seal_prompts(run, drv_ours.prompts(count))
            recipe = drv_ours.recipe_for(url, "m", connections, folder)
            before_s, started_s = cpu_s(), time.perf_counter()
            with run.locked():
                generate(recipe, run, folder)
        else:
            if kind == "aiohttp":
                import aiohttp  # noqa: F401 - its import is not counted either
            ask = {
                "aiohttp": lambda: ask_aiohttp(url, count, connections),
                "httpx": lambda: ask_httpx(url, count, connections),
                "fetch": lambda: ask_ours(url, count, connections, None),
                "journaled": lambda: ask_ours(url, count, connections, folder),
            }[kind]
            # Client and journal are measured as the session runs them; the controls as people run them.
            rare = rare_collections() if kind in ("fetch", "journaled") else contextlib.nullcontext()
            before_s, started_s = cpu_s(), time.perf_counter()
            with rare:
                uvloop.run(ask())
        figures = {
            "cpu_s_per_1000": round(1000 * (cpu_s() - before_s) / count, 3),
            "wall_s": round(time.perf_counter() - started_s, 1),
            "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        }
    print(json.dumps(figures))


def race(
    count: int, connections: int, latency_ms: float, kinds: Sequence[str], *, is_tls: bool = False, rounds: int = 1
) -> dict[str, Any]:
    """Run the contestants one after another against one server; return their figures and ratios.

    Of several rounds the cheapest of each counts: what others do on the machine only ever adds. `rounds` are the
    CPU-seconds of all, `by_median` the ratios of their medians.
    """
    module = [sys.executable, "-m", "tests.bench.bench_generation", "--latency-ms", str(latency_ms)]
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        if is_tls:
            certificate = make_certificate(Path(name))
            environment["SSL_CERT_FILE"] = str(certificate)
            module += ["--certificate", str(certificate)]
        server = subprocess.Popen([*module, "--serve"], stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert server.stdout is not None
            url = f"{'https' if is_tls else 'http'}://127.0.0.1:{server.stdout.readline().strip()}/v1"
            trusted = ssl.create_default_context(cafile=environment["SSL_CERT_FILE"]) if is_tls else False
            found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
            for kind in [kind for number in range(rounds) for kind in (kinds if number % 2 == 0 else kinds[::-1])]:
                asked, at_once = (1000, HTTPX_CONNECTIONS) if kind == "httpx" else (count, connections)
                run = [*module, "--contestant", kind, "--url", url, "-n", str(asked), "-c", str(at_once)]
                output = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
                peak = httpx.get(f"{url}/stats", trust_env=False, verify=trusted).json()["peak"]
                found[kind].append({"asked": asked, "at_once": at_once, "peak_at_server": peak, **json.loads(output)})
        finally:
            server.kill()
            server.wait()
    results: dict[str, Any] = {}
    cheapest: dict[str, float] = {}
    median: dict[str, float] = {}
    for kind, rows in found.items():
        rows.sort(key=lambda row: row["cpu_s_per_1000"])
        costs = [row["cpu_s_per_1000"] for row in rows]
        results[kind] = {**rows[0], "rounds": costs}
        cheapest[kind], median[kind] = costs[0], statistics.median(costs)
    return {**results, **_ratios(cheapest), "by_median": _ratios(median)}


def _ratios(cost: dict[str, float]) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for over, under in (("stage", "aiohttp"), ("stage", "fetch"), ("journaled", "fetch"), ("httpx", "stage")):
        if over in cost and under in cost:
            ratios[f"{over}_over_{under}"] = round(cost[over] / cost[under], 2)
    return ratios


def main() -> None:
    """Race them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=5000)
    parser.add_argument("-c", type=int, default=2000)
    parser.add_argument("--latency-ms", type=float, default=2000)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default="httpx,aiohttp,fetch,journaled,stage")
    parser.add_argument("--contestant")
    parser.add_argument("--url")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--certificate")
    arguments = parser.parse_args()
    if arguments.serve:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        uvloop.run(serve(arguments.latency_ms / 1000, arguments.certificate))
    elif arguments.contestant:
        contestant(arguments.contestant, arguments.url, arguments.n, arguments.c)
    else:
        kinds = arguments.kinds.split(",")
        options = {"is_tls": arguments.tls, "rounds": arguments.rounds}
        print(json.dumps(race(arguments.n, arguments.c, arguments.latency_ms, kinds, **options), indent=1))


if __name__ == "__main__":
    main()
