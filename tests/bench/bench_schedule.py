"""Makespan of six datasets over one pool of slots, beside the same data one dataset after another and beside the ideal.

    python -m tests.bench.bench_schedule [-n 3000] [-c 75] [--median-s 0.6] [--sigma 0.6]

The real stage asks a server whose answers take lognormal times, the same for a prompt in every run; medians of the six
datasets differ sevenfold around `--median-s` (20 s in life, scaled down). The ideal is the larger of all the server's
seconds shared evenly by the slots, and the longest answer: no order can be faster. It knows how long each answer will
take; with heavy tails (`--sigma 1.0`) nobody reaches it, so the computed makespan of the datasets in order of their
true medians, longest first, stands beside it.
"""

import argparse
import asyncio
import heapq
import json
import math
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httptools
import uvloop

from eagle3.artifacts import RunDirectory, Stage
from eagle3.generation import open_session, seal_completions
from eagle3.generation.shards import prompt_shards
from tests.bench import drv_ours

DATASETS = {"a": 0.3, "b": 0.6, "c": 1.0, "d": 1.0, "e": 1.5, "f": 2.1}
"""Name and median as a multiple of the overall one."""
TAG = re.compile(rb"\[\[([a-f])(\d{6})\]\]")


def latency_s(dataset: str, number: int, median_s: float, sigma: float) -> float:
    """Return how long the answer to one prompt takes."""
    rng = random.Random(f"{dataset}-{number}")
    return DATASETS[dataset] * median_s * math.exp(sigma * rng.gauss(0.0, 1.0))


class _Server(asyncio.Protocol):
    def __init__(self, median_s: float, sigma: float) -> None:
        self._median_s = median_s
        self._sigma = sigma

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        tag = TAG.search(body)
        if tag is None:
            self._write({"data": []})
            return
        wait_s = latency_s(tag[1].decode(), int(tag[2]), self._median_s, self._sigma)
        message = {"role": "assistant", "content": "word " * 400}
        document = {
            "id": tag[0].decode(),
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 180, "completion_tokens": 400},
        }
        asyncio.get_running_loop().call_later(wait_s, self._write, document)

    def _write(self, document: object) -> None:
        body = json.dumps(document).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)  # type: ignore[attr-defined]


async def serve(median_s: float, sigma: float) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Server(median_s, sigma), "127.0.0.1", 0, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def makespan_s(url: str, count: int, slots: int, *, is_one_after_another: bool) -> float:
    """Buy all answers and return the seconds from the first request to the last answer's shard."""
    with tempfile.TemporaryDirectory() as name:
        run = RunDirectory(Path(name) / "run")
        each = count // len(DATASETS)
        drv_ours.seal_prompts(run, [record for dataset in DATASETS for record in drv_ours.prompts(each, dataset)])
        recipe = drv_ours.recipe_for(url, "m", slots, Path(name), tuple(DATASETS))
        with run.locked(), open_session(recipe, run, Path(name)) as session:
            started_s = time.perf_counter()
            if is_one_after_another:
                shards = prompt_shards(run.sealed(Stage.PROMPTS))
                for dataset in DATASETS:
                    own = [shard for shard in shards if shard.path.startswith(f"{dataset}/")]
                    with ThreadPoolExecutor(len(own)) as pool:
                        list(pool.map(session.generate_shard, own))
            else:
                session.generate_all()
            elapsed_s = time.perf_counter() - started_s
        assert seal_completions(session).stats["samples"] == each * len(DATASETS)
        return elapsed_s


def longest_first_s(times: Sequence[float], slots: int) -> float:
    """Return the makespan of answers begun in the reverse of the given order, without any overhead."""
    free_at = [0.0] * slots
    for time_s in reversed(times):
        heapq.heapreplace(free_at, free_at[0] + time_s)
    return max(free_at)


def measure(count: int, slots: int, median_s: float, sigma: float) -> dict[str, Any]:
    """Return both makespans over the ideal."""
    each = count // len(DATASETS)
    times = [latency_s(name, number, median_s, sigma) for name in DATASETS for number in range(each)]
    ideal_s = max(sum(times) / slots, *times)
    command = [sys.executable, "-m", "tests.bench.bench_schedule", "--serve"]
    command += ["--median-s", str(median_s), "--sigma", str(sigma)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
            ours_s = makespan_s(url, count, slots, is_one_after_another=False)
            control_s = makespan_s(url, count, slots, is_one_after_another=True)
        finally:
            server.kill()
    return {
        "answers": len(times),
        "slots": slots,
        "ideal_s": round(ideal_s, 1),
        "longest_answer_s": round(max(times), 1),
        "makespan_over_ideal": round(ours_s / ideal_s, 3),
        "known_medians_over_ideal": round(longest_first_s(times, slots) / ideal_s, 3),
        "one_after_another_over_ideal": round(control_s / ideal_s, 3),
    }


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=3000)
    parser.add_argument("-c", type=int, default=75)
    parser.add_argument("--median-s", type=float, default=0.6)
    parser.add_argument("--sigma", type=float, default=0.6)
    parser.add_argument("--serve", action="store_true")
    arguments = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if arguments.serve:
        uvloop.run(serve(arguments.median_s, arguments.sigma))
        return
    print(json.dumps(measure(arguments.n, arguments.c, arguments.median_s, arguments.sigma), indent=1))


if __name__ == "__main__":
    main()
