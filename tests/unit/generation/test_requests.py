"""Bodies of requests: resting providers are left out of new ones, and a sample's own bytes never change."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

from eagle3.generation import requests
from eagle3.generation.cooldown import FAILURES_IN_A_ROW, FIRST_REST_S, Cooldown
from eagle3.generation.history import History
from eagle3.generation.journal import Journal
from eagle3.generation.journal_lines import journal_paths, read_journal
from eagle3.generation.requests import Plan, RequestWriter, Shard, Work
from eagle3.providers.connection import ApiKey
from eagle3.providers.openrouter import OpenRouterProvider
from eagle3.providers.policy import select
from eagle3.recipe import Routing, Sampling
from tests.unit.generation.world import ENDPOINT, prompts_of

OTHER = replace(ENDPOINT, provider="Moonshot", tag="moonshot/int4")


def test_a_resting_provider_is_left_out_of_new_requests_until_it_has_rested(tmp_path, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(requests.time, "monotonic", lambda: now_s)

    async def body_of(name: str) -> bytes:
        (prompt,) = prompts_of([name])
        work = Work(prompt, plan, Shard(1, asyncio.get_running_loop().create_future()), 0.0, 10)
        first = await writer.body(work)
        assert await writer.body(work) is first
        return first

    async def scenario() -> list[list[str]]:
        nonlocal writer, now_s
        journal = Journal(tmp_path, window_s=0.0)
        writer = RequestWriter(provider, journal, history, cooldown, {})
        ignored = [_ignored(await body_of("a"))]
        for _ in range(FAILURES_IN_A_ROW):
            cooldown.failed("Chutes", now_s)
        ignored += [_ignored(await body_of("b")), _ignored(await body_of("c"))]
        now_s += FIRST_REST_S
        ignored.append(_ignored(await body_of("d")))
        await journal.aclose()
        return ignored

    provider = OpenRouterProvider(
        base_url="http://x/v1", key=ApiKey("k"), model="m/m", routing=Routing(), response_cache=True
    )
    selection = select([ENDPOINT, OTHER], Routing(), model="m/m", max_tokens=50)
    plan = Plan(dataset="d", sampling=Sampling(max_tokens=50), selection=selection, cap=selection.cap)
    history, cooldown = History(), Cooldown()
    writer: RequestWriter
    always, *resting, after = asyncio.run(scenario())
    assert ENDPOINT.tag not in always
    assert after == always
    assert resting == [sorted([*always, ENDPOINT.tag])] * 2
    assert len(history.routings) == len(_journaled(tmp_path)) == 2


def _ignored(body: bytes) -> list[str]:
    return json.loads(body)["provider"].get("ignore", [])


def _journaled(root: Path) -> list[str]:
    return [entry["routing"] for path in journal_paths(root) for _, entry in read_journal(path)]
