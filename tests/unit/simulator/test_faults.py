"""Every fault, its bill and its cure; and that a day repeats whatever the order of its requests."""

import random
from decimal import Decimal

import pytest

from eagle3.simulator.faults import latency_s
from eagle3.simulator.scenario import Latency, draw
from tests.unit.simulator.conftest import provider

COST = Decimal("0.000012")
PROMPT_COST = Decimal("0.000004")
HTTP_KINDS = ["http_429", "http_500", "http_502", "http_503", "http_504", "http_524", "http_529"]


def fault(kind: str, **fields):
    return {"kind": kind, "share": 1, **fields}


@pytest.mark.parametrize("kind", HTTP_KINDS)
def test_http_errors_are_free_and_pass_on_the_second_attempt(bench, kind):
    sim = bench(faults=[fault(kind)])
    reply = sim.finished(sim.chat())
    assert reply.status == int(kind.removeprefix("http_"))
    assert sim.state.account.usage_usd == 0
    assert sim.get(f"/generation?id={reply.headers['x-generation-id']}").status == 404
    if kind == "http_524":
        assert reply.body.startswith(b"<!DOCTYPE html>")
    else:
        assert reply.json()["error"]["code"] == reply.status
    assert sim.finished(sim.chat()).status == 200
    assert sim.state.counters.in_flight == 0


def test_an_http_error_may_hide_a_billed_answer(bench):
    sim = bench(faults=[fault("http_502", billed=True)])
    reply = sim.finished(sim.chat(cached=True))
    assert reply.status == 502
    assert sim.state.account.usage_usd == COST
    assert sim.get(f"/generation?id={reply.headers['x-generation-id']}").json()["data"]["total_cost"] > 0
    assert sim.chat(cached=True).reply.headers["x-openrouter-cache-status"] == "HIT"


@pytest.mark.parametrize(("kind", "has_hint"), [("http_429", True), ("http_503", True), ("http_502", False)])
def test_retry_after(bench, kind, has_hint):
    reply = bench(faults=[fault(kind, retry_after_s=3)])
    sent = reply.finished(reply.chat()).headers
    assert sent.get("retry-after") == ("3" if has_hint else None)
    plain = bench(faults=[fault(kind)])
    assert "retry-after" not in plain.finished(plain.chat()).headers


def test_only_the_first_attempts_fail(bench):
    sim = bench(faults=[fault("http_502", first_attempts=3)])
    assert [sim.finished(sim.chat()).status for _ in range(5)] == [502, 502, 502, 200, 200]


def test_attempts_are_counted_across_changed_routing_but_not_across_replicas(bench):
    sim = bench(faults=[fault("http_502")])
    assert sim.finished(sim.chat()).status == 502
    assert sim.finished(sim.chat(provider={"ignore": ["other"]})).status == 200
    assert sim.finished(sim.chat(seed=2)).status == 502


def test_error_in_200(bench):
    sim = bench(faults=[fault("error_in_200")])
    reply = sim.finished(sim.chat(cached=True))
    assert reply.status == 200
    assert "choices" not in reply.json()
    assert reply.json()["error"]["metadata"]["provider_name"] == "Solo"
    assert sim.state.account.usage_usd == 0
    assert sim.chat(cached=True).reply is None, "an error is not cached"


def test_choice_error_has_partial_text_and_is_insured(bench):
    sim = bench(faults=[fault("choice_error")])
    choice = sim.finished(sim.chat()).json()["choices"][0]
    assert choice["finish_reason"] == "error"
    assert choice["error"]["code"] == 502
    assert choice["message"]["content"] == "Hi t"
    assert sim.state.account.usage_usd == 0


@pytest.mark.parametrize("kind", ["error_in_200", "choice_error"])
def test_an_error_ends_a_stream(bench, kind):
    sim = bench(faults=[fault(kind)])
    reply = sim.finished(sim.chat(stream=True))
    assert reply.status == 200
    assert reply.events()[-1]["error"]["code"] == 502
    assert b"[DONE]" not in reply.body
    assert sim.state.account.usage_usd == 0


@pytest.mark.parametrize("stream", [False, True])
def test_cut_body_is_billed_and_its_answer_is_in_the_cache(bench, stream):
    sim = bench(faults=[fault("cut_body")])
    call = sim.chat(cached=True, stream=stream)
    reply = sim.finished(call)
    assert not reply.is_complete
    assert call.transport.is_closed
    assert sim.state.account.usage_usd == COST
    hit = sim.chat(cached=True, stream=stream).reply
    assert hit.headers["x-openrouter-cache-source-id"] == reply.headers["x-generation-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_padding_only(bench, stream):
    sim = bench(faults=[fault("padding_only")])
    reply = sim.finished(sim.chat(stream=stream))
    assert reply.is_complete
    assert not reply.body.replace(b": OPENROUTER PROCESSING", b"").strip()
    assert sim.state.account.usage_usd == COST


@pytest.mark.parametrize("billed", [True, False])
def test_dropped(bench, billed):
    sim = bench(faults=[fault("dropped", billed=billed)])
    call = sim.chat(cached=True)
    sim.clock.advance(60)
    assert call.transport.written == b""
    assert call.transport.is_closed
    assert sim.state.account.usage_usd == (COST if billed else 0)
    assert (sim.chat(cached=True).reply is not None) is billed


@pytest.mark.parametrize("stream", [False, True])
def test_hang_pads_until_the_client_gives_up(bench, stream):
    sim = bench(faults=[fault("hang")])
    call = sim.chat(stream=stream)
    sim.clock.advance(30)
    seen = len(call.reply.body)
    assert not call.reply.body.replace(b": OPENROUTER PROCESSING", b"").strip()
    sim.clock.advance(30)
    assert len(call.reply.body) > seen
    assert sim.state.counters.in_flight == 1
    assert sim.state.account.usage_usd == COST
    call.disconnect()
    sim.clock.advance(1)
    assert sim.state.counters.in_flight == 0


@pytest.mark.parametrize("leaves_early", [True, False])
def test_silence_says_nothing(bench, leaves_early):
    sim = bench(faults=[fault("silence")])
    call = sim.chat()
    if leaves_early:
        call.disconnect()
    sim.clock.advance(600)
    assert call.transport.written == b""
    assert sim.state.account.usage_usd == COST
    assert sim.state.counters.in_flight == (0 if leaves_early else 1)
    call.disconnect()
    assert sim.state.counters.in_flight == 0


def test_empty_is_billed_and_blank_is_insured(bench):
    sim = bench(faults=[fault("empty")])
    body = sim.finished(sim.chat()).json()
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("", "stop")
    assert body["usage"]["completion_tokens"] == 0
    assert sim.state.account.usage_usd == PROMPT_COST
    sim = bench(faults=[fault("blank")])
    body = sim.finished(sim.chat()).json()
    assert body["choices"][0]["finish_reason"] is None
    assert sim.state.account.usage_usd == 0


def test_an_empty_reply_stays_in_the_cache_until_cleared(bench):
    sim = bench(faults=[fault("empty")])
    sim.finished(sim.chat(cached=True))
    assert sim.chat(cached=True).reply.json()["choices"][0]["message"]["content"] == ""
    good = sim.finished(sim.chat(cached=True, clear=True))
    assert good.json()["choices"][0]["message"]["content"] == "Hi there!"


def test_content_filter_is_not_billed(bench):
    sim = bench(faults=[fault("content_filter")])
    assert sim.finished(sim.chat()).json()["choices"][0]["finish_reason"] == "content_filter"
    assert sim.state.account.usage_usd == 0


def test_a_fault_may_belong_to_one_provider(bench):
    sim = bench(providers=[provider("One"), provider("Two")], faults=[fault("http_502", provider="two")])
    assert sim.finished(sim.chat("prompt 1", provider={"only": ["one"]})).status == 200
    assert sim.finished(sim.chat("prompt 2", provider={"only": ["two"]})).status == 502


def story(bench, order):
    sim = bench(
        providers=[provider("One"), provider("Two"), provider("Three", space_around_control_tokens=True)],
        faults=[{"kind": "http_502", "share": 0.2}, {"kind": "cut_body", "share": 0.1}],
    )
    calls = {number: sim.chat(f"prompt {number}") for number in order}
    sim.clock.advance(60)
    again = {number: sim.chat(f"prompt {number}") for number in reversed(order)}
    sim.clock.advance(60)
    told = {}
    for number in sorted(order):
        first, second = calls[number].reply, again[number].reply
        body = second.json()
        text = body["choices"][0]["message"]["content"]
        told[number] = (first.status, first.is_complete, second.status, body["provider"], text)
    return told


def test_a_day_repeats_whatever_the_order_of_its_requests(bench):
    order = list(range(150))
    told = story(bench, order)
    random.Random(5).shuffle(order)
    assert story(bench, order) == told
    statuses = [status for status, *_ in told.values()]
    assert 0.1 < statuses.count(502) / 150 < 0.3
    assert {name for *_, name, _ in told.values()} == {"One", "Two", "Three"}
    assert any(text.endswith(" ") for *_, text in told.values())


def test_another_seed_is_another_day(bench):
    statuses = []
    for seed in (1, 2):
        sim = bench(seed=seed, faults=[{"kind": "http_502", "share": 0.5}])
        calls = [sim.chat(f"prompt {number}") for number in range(50)]
        sim.clock.advance(60)
        statuses.append([call.reply.status for call in calls])
    assert statuses[0] != statuses[1]


def test_draws_are_uniform():
    draws = sorted(draw(1, "x", i) for i in range(4000))
    assert draws[0] > 0
    assert draws[-1] < 1
    assert max(abs(value - i / 4000) for i, value in enumerate(draws)) < 0.03


def test_latency_has_the_stated_median_and_a_tail():
    shape = Latency(median_s=2, sigma=0.5, per_token_s=0.01)
    seconds = sorted(latency_s(shape, seed=1, sample_key=str(i), attempt=0, tokens=100) for i in range(2001))
    assert seconds[1000] == pytest.approx(3.0, rel=0.05)
    assert seconds[1980] > 5
    assert latency_s(Latency(median_s=2, sigma=0), seed=1, sample_key="a", attempt=3, tokens=9) == pytest.approx(2)
