"""What one simulator process carries: requests in flight by its own counter, and its CPU time per 1000 requests.

Run `python tests/bench/bench_simulator.py [--in-flight 2000] [--requests 6000]`. The control in the same run is the
same load without keep-alive whitespace (one write per reply).
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from pathlib import Path

import psutil
import uvloop

from eagle3.simulator.process import SimulatorProcess

SCENARIO = """
name: bench
seed: 1
padding_interval_s: {padding_s}
models: [{{id: bench/model, suffix: "1"}}]
providers:
  - name: Solo
    tag: solo/bf16
    quantization: bf16
    prompt_usd_per_mtok: 0.03
    completion_usd_per_mtok: 0.05
    latency: {{median_s: 3.0, sigma: 0.3}}
account: {{credits_usd: 1000}}
"""
NUM_PROMPTS = 500


def prompt(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Explain topic number {number} in a few sentences. " * 4}]


def write_answers(path: Path) -> None:
    with path.open("w") as file:
        for number in range(NUM_PROMPTS):
            record = {
                "messages": prompt(number),
                "prompt_ids": list(range(60)),
                "output_ids": list(range(300)),
                "text": f"Topic {number} is about the usual things. " * 40,
                "finish_reason": "stop",
            }
            file.write(json.dumps(record) + "\n")


class Client(asyncio.Protocol):
    """Sends one request after the other on one connection; reads until the last chunk."""

    def __init__(self, bodies: list[bytes], head: bytes, done: asyncio.Semaphore) -> None:
        self.bodies, self.head, self.done = bodies, head, done
        self.tail = b""

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        if self.bodies:
            body = self.bodies.pop()
            self.transport.write(self.head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-7:]
        if self.tail.endswith(b"\r\n0\r\n\r\n"):
            self.tail = b""
            self.done.release()
            self.send()


async def load(port: int, in_flight: int, requests: int) -> None:
    bodies = [
        json.dumps({"model": "bench/model", "messages": prompt(i % NUM_PROMPTS), "max_tokens": 512, "seed": i}).encode()
        for i in range(requests)
    ]
    head = b"POST /api/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer bench\r\n"
    done = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for start in range(0, in_flight, 200):
        await asyncio.gather(
            *(
                loop.create_connection(lambda: Client(bodies, head, done), "127.0.0.1", port)
                for _ in range(start, min(start + 200, in_flight))
            )
        )
    for _ in range(requests):
        await done.acquire()


def measure(folder: Path, label: str, padding_s: float, in_flight: int, requests: int) -> None:
    scenario, answers = folder / f"{label}.yaml", folder / "answers.jsonl"
    scenario.write_text(SCENARIO.format(padding_s=padding_s))
    with SimulatorProcess(scenario, [answers]) as simulator:
        process = psutil.Process(simulator.pid)
        before = process.cpu_times()
        started_s = time.monotonic()
        uvloop.run(load(int(simulator.base_url.split(":")[2].split("/")[0]), in_flight, requests))
        wall_s = time.monotonic() - started_s
        after = process.cpu_times()
        stats = simulator.stats()
        cpu_s = after.user + after.system - before.user - before.system
        print(
            f"{label:22} peak in flight {stats['peak_in_flight']:5d}  requests {stats['requests']}  "
            f"CPU {cpu_s / requests * 1000:.3f} s per 1000 requests  {requests / wall_s:.0f} req/s  "
            f"RSS {process.memory_info().rss / 2**20:.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-flight", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=6000)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_answers(folder / "answers.jsonl")
        measure(folder, "keep-alive every 0.4 s", 0.4, options.in_flight, options.requests)
        measure(folder, "control: no keep-alive", 60.0, options.in_flight, options.requests)


if __name__ == "__main__":
    main()
