"""CPU per request of the whole generation stage, beside two controls in the same run, against one fake server.

    python tests/bench/bench_generation.py [-n 3000] [-c 1000] [--latency-ms 1000]

Three processes ask the same server for the same number of answers: `stage` is everything (journal with synced intents
and outcomes, ledger, limiter, parsing, Parquet), `fetch` only our transport under `httpx.AsyncClient`, `httpx` the same
with httpx's own pool, at fewer connections since it is quadratic. CPU-seconds are user + system of the process, import
time taken off. On a shared machine compare the ratios, not the seconds.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httptools
import httpx
import uvloop

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


async def serve(latency_s: float) -> None:
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
    server = await loop.create_server(lambda: _Server(reply, latency_s), "127.0.0.1", 0, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def fetch(url: str, count: int, connections: int, *, is_own_transport: bool) -> None:
    """Ask `count` times with nothing around it."""
    from eagle3.providers.transport import FastTransport

    transport = FastTransport() if is_own_transport else None
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 150}]}).encode()
    turns = asyncio.Semaphore(connections)
    async with httpx.AsyncClient(transport=transport, limits=limits, timeout=600) as client:

        async def ask() -> None:
            async with turns:
                reply = await client.post(f"{url}/chat/completions", content=body)
                assert reply.status_code == 200

        await asyncio.gather(*(ask() for _ in range(count)))


def cpu_s() -> float:
    """Return user and system seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def contestant(kind: str, url: str, count: int, connections: int) -> None:
    """Run one contestant in this process and print what it cost."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if kind == "stage":
        import drv_ours

        from eagle3.artifacts import RunDirectory
        from eagle3.generation.session import generate

        with tempfile.TemporaryDirectory() as folder:
            run = RunDirectory(Path(folder) / "run")
            drv_ours.seal_prompts(run, drv_ours.prompts(count))
            recipe = drv_ours.recipe_for(url, "m", connections, Path(folder))
            before_s, started_s = cpu_s(), time.perf_counter()
            generate(recipe, run, Path(folder))
            spent_s = cpu_s() - before_s
    else:
        before_s, started_s = cpu_s(), time.perf_counter()
        uvloop.run(fetch(url, count, connections, is_own_transport=kind == "fetch"))
        spent_s = cpu_s() - before_s
    print(
        json.dumps(
            {
                "cpu_s_per_1000": round(1000 * spent_s / count, 3),
                "wall_s": round(time.perf_counter() - started_s, 1),
                "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            }
        )
    )


def main() -> None:
    """Race the three."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=3000)
    parser.add_argument("-c", type=int, default=1000)
    parser.add_argument("--latency-ms", type=float, default=1000)
    parser.add_argument("--contestant", choices=["stage", "fetch", "httpx"])
    parser.add_argument("--url")
    parser.add_argument("--serve", action="store_true")
    arguments = parser.parse_args()
    if arguments.serve:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        uvloop.run(serve(arguments.latency_ms / 1000))
        return
    if arguments.contestant:
        contestant(arguments.contestant, arguments.url, arguments.n, arguments.c)
        return
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, __file__, "--latency-ms", str(arguments.latency_ms)]
    server = subprocess.Popen([*command, "--serve"], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
        results: dict[str, Any] = {}
        for kind in ("httpx", "fetch", "stage"):
            count, connections = (arguments.n, arguments.c) if kind != "httpx" else (1000, HTTPX_CONNECTIONS)
            run = [*command, "--contestant", kind, "--url", url, "-n", str(count), "-c", str(connections)]
            output = subprocess.run(run, check=True, capture_output=True, text=True, env=environment).stdout
            peak = httpx.get(f"{url}/stats", trust_env=False).json()["peak"]
            results[kind] = {"asked": count, "at_once": connections, "peak_at_server": peak, **json.loads(output)}
        cost = {kind: figures["cpu_s_per_1000"] for kind, figures in results.items()}
        results["stage_over_fetch"] = round(cost["stage"] / cost["fetch"], 2)
        results["httpx_over_stage"] = round(cost["httpx"] / cost["stage"], 2)
        print(json.dumps(results, indent=1))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
