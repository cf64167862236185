"""Replies, streams, billing and the cache, on a manual clock."""

import json
from decimal import Decimal

import pytest

from eagle3.simulator.answers import Answer, Answers, ToolCall
from eagle3.simulator.server import MAX_BODY_BYTES
from tests.unit.simulator.conftest import MODEL, plain_answer, provider, user

COST = Decimal("0.000012")  # 4 prompt tokens at 1 USD/M and 4 completion tokens at 2 USD/M


def test_a_reply_is_padded_and_then_complete(bench):
    sim = bench()
    call = sim.chat()
    assert call.reply is None
    sim.clock.advance(1.0)
    early = call.reply
    assert early.status == 200
    assert not early.is_complete
    assert early.body == b"\n         \n" * 2  # one piece each 0.4 s
    assert early.headers["x-generation-id"].startswith("gen-")
    reply = sim.finished(call)
    assert reply.is_complete
    body = reply.json()
    assert body["id"] == reply.headers["x-generation-id"]
    assert body["model"] == f"{MODEL}-0101"
    assert body["provider"] == "Solo"
    assert body["choices"][0]["message"]["content"] == "Hi there!"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 4
    assert Decimal(str(body["usage"]["cost"])) == COST == sim.state.account.usage_usd


def test_at_most_19_pieces_of_padding(bench):
    sim = bench(providers=[provider("Solo", latency={"median_s": 100, "sigma": 0})])
    reply = sim.finished(sim.chat(), after_s=200)
    assert 1 <= reply.body.count(b"\n         \n") <= 19


def test_even_an_instant_reply_is_padded(bench):
    sim = bench(time_scale=0)
    assert sim.finished(sim.chat(), after_s=0).body.startswith(b"\n         \n{")


def test_truth_holds_the_real_ids(bench):
    sim = bench()
    reply = sim.finished(sim.chat())
    truth = sim.admin("GET", "/truth").json()["generations"][reply.headers["x-generation-id"]]
    assert truth["output_ids"] == [10, 11, 12, 2]
    assert Decimal(truth["cost_usd"]) == COST
    assert truth["provider"] == "Solo"
    assert truth["attempt"] == 0


def test_unknown_prompt_and_malformed_requests_get_400(bench):
    sim = bench()
    assert "no recorded answer" in sim.chat("something else").reply.json()["error"]["message"]
    for body in (b"{", b"[]", b'{"model":1}', json.dumps({"model": MODEL, "messages": []}).encode()):
        reply = sim.send("POST", "/api/v1/chat/completions", body).reply
        assert reply.status == 400
        assert reply.json()["error"]["code"] == 400
    assert "valid model" in sim.chat(model="acme/none").reply.json()["error"]["message"]
    assert sim.chat(max_tokens=0).reply.status == 400
    assert sim.chat(stream="yes").reply.status == 400
    assert sim.state.counters.in_flight == 0
    assert sim.state.account.usage_usd == 0


def test_context_length_is_enforced(bench):
    sim = bench(providers=[provider("Solo", context_length=100)])
    assert sim.chat(max_tokens=96).reply is None
    assert "maximum context length is 100" in sim.chat(max_tokens=97).reply.json()["error"]["message"]


def test_authentication(bench):
    sim = bench(account={"credits_usd": 1, "key": "right", "management_key": "boss"})
    body = {"model": MODEL, "messages": user("hi"), "max_tokens": 5}
    for key in (None, "wrong"):
        assert sim.send("POST", "/api/v1/chat/completions", body, key=key).reply.status == 401
        assert sim.get("/key", key=key).status == 401
    assert sim.send("POST", "/api/v1/chat/completions", body, key="boss").reply.status == 403
    assert sim.send("POST", "/api/v1/chat/completions", body, key="right").reply is None
    assert sim.get("/credits", key="right").status == 403
    assert sim.get("/credits", key="boss").json()["data"]["total_credits"] == 1
    assert bench().send("POST", "/api/v1/chat/completions", body, key=None).reply.status == 401


def test_generation_is_404_for_a_while_and_then_tells_the_cost(bench):
    sim = bench(generation_lag_s=3)
    call = sim.chat()
    sim.clock.advance(2.5)
    generation_id = call.reply.headers["x-generation-id"]
    assert sim.get(f"/generation?id={generation_id}").status == 404
    sim.clock.advance(3)
    record = sim.get(f"/generation?id={generation_id}").json()["data"]
    assert Decimal(str(record["total_cost"])) == COST
    assert record["native_tokens_completion"] == 4
    assert sim.get("/generation?id=gen-none").status == 404


def test_a_client_that_leaves_is_billed_and_cached_all_the_same(bench):
    sim = bench()
    call = sim.chat(cached=True)
    sim.clock.advance(0.5)
    call.disconnect()
    assert sim.state.account.usage_usd == 0
    sim.clock.advance(10)
    assert sim.state.account.usage_usd == COST
    assert sim.state.counters.in_flight == 0
    again = sim.chat(cached=True).reply
    assert again.headers["x-openrouter-cache-status"] == "HIT"
    assert sim.state.account.usage_usd == COST


def test_cache_hit_is_free_has_no_usage_and_names_its_source(bench):
    sim = bench()
    first = sim.finished(sim.chat(cached=True))
    assert first.headers["x-openrouter-cache-status"] == "MISS"
    hit = sim.chat(cached=True).reply
    assert hit.headers["x-openrouter-cache-status"] == "HIT"
    assert hit.headers["x-openrouter-cache-source-id"] == first.json()["id"]
    assert hit.json()["choices"] == first.json()["choices"]
    assert hit.json()["id"] != first.json()["id"]
    usage = hit.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["cost"]) == (0, 0, 0)
    assert sim.state.account.usage_usd == COST
    sim.clock.advance(10)
    record = sim.get(f"/generation?id={hit.json()['id']}").json()["data"]
    assert record["response_cache_source_id"] == first.json()["id"]
    assert record["total_cost"] == 0


@pytest.mark.parametrize(
    "change",
    [{"cached": False}, {"clear": True}, {"seed": 1}, {"stream": True}, {"provider": {"ignore": ["other"]}}],
)
def test_what_makes_a_cache_miss(bench, change):
    sim = bench()
    sim.finished(sim.chat(cached=True))
    sim.finished(sim.chat(**{"cached": True, **change}))
    assert sim.state.account.usage_usd == 2 * COST


def test_cache_is_per_key_and_expires(bench):
    sim = bench()
    sim.finished(sim.chat(cached=True), after_s=10)
    body = {"model": MODEL, "messages": user("hi"), "max_tokens": 50}
    other = sim.send("POST", "/api/v1/chat/completions", body, key="k2", headers={"X-OpenRouter-Cache": "true"})
    assert other.reply is None
    sim.clock.advance(299)
    assert sim.chat(cached=True).reply is None


def test_identical_requests_in_flight_are_both_billed(bench):
    sim = bench()
    first, second = sim.chat(cached=True), sim.chat(cached=True)
    sim.clock.advance(60)
    assert first.reply.json()["id"] != second.reply.json()["id"]
    assert sim.state.account.usage_usd == 2 * COST
    assert sim.admin("GET", "/stats").json()["paid_more_than_once"] == 1


def thoughtful_answer() -> Answer:
    return Answer(
        prompt_ids=(1, 2, 3),
        output_ids=tuple(range(20)),
        finish_reason="tool_calls",
        reasoning="I should look it up.",
        content="One moment.\n",
        tool_calls=(ToolCall(id="functions.get:0", name="get", arguments='{"city":"Rome", "n": 1}'),),
        num_reasoning_tokens=7,
        is_reasoning_opened=True,
        is_reasoning_closed=True,
        is_ended=True,
    )


def joined(events) -> dict[str, object]:
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return {
        "reasoning": "".join(delta.get("reasoning") or "" for delta in deltas),
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "arguments": "".join(call["function"]["arguments"] for call in calls),
        "ids": [call["id"] for call in calls if "id" in call],
    }


def test_stream_joins_to_the_same_texts(bench):
    answers = Answers()
    answers.add(user("hi"), thoughtful_answer())
    sim = bench(answers=answers)
    call = sim.chat(stream=True)
    assert call.reply.body.startswith(b": OPENROUTER PROCESSING\n\n")
    sim.clock.advance(1.0)
    assert 0 < len(call.reply.events()) < 25
    reply = sim.finished(call)
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.body.endswith(b"data: [DONE]\n\n")
    events = reply.events()
    assert joined(events) == {
        "reasoning": "I should look it up.",
        "content": "One moment.\n",
        "arguments": '{"city":"Rome", "n": 1}',
        "ids": ["functions.get:0"],
    }
    finishes = [event["choices"][0]["finish_reason"] for event in events]
    assert finishes[-2:] == ["tool_calls", "tool_calls"]
    assert set(finishes[:-2]) == {None}
    assert events[-1]["usage"]["completion_tokens"] == 20
    assert "usage" not in events[-2]


@pytest.mark.parametrize(("cancels", "is_partial"), [(True, True), (False, False)])
def test_leaving_a_stream_stops_the_bill_only_where_the_provider_cancels(bench, cancels, is_partial):
    answers = Answers()
    answers.add(user("hi"), plain_answer("word " * 100, output_ids=tuple(range(100))))
    sim = bench(answers=answers, providers=[provider("Solo", cancels_streams=cancels)])
    call = sim.chat(stream=True, max_tokens=500)
    sim.clock.advance(1.0)
    call.disconnect()
    sim.clock.advance(60)
    full = Decimal("0.000204")
    assert (0 < sim.state.account.usage_usd < full) is is_partial
    assert (sim.state.account.usage_usd == full) is not is_partial
    assert sim.state.counters.in_flight == 0


def test_requests_on_one_connection_are_answered_in_turn(bench):
    sim = bench()
    call = sim.chat("prompt 1")
    body = json.dumps({"model": MODEL, "messages": user("prompt 2"), "max_tokens": 50}).encode()
    head = f"POST /api/v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer k\r\nContent-Length: {len(body)}\r\n\r\n"
    call.connection.data_received(head.encode() + body)
    sim.clock.advance(10)
    written = call.transport.written
    assert written.count(b"HTTP/1.1 200 OK") == 2
    assert written.index(b"Answer 1.") < written.index(b"Answer 2.")


def test_bytes_that_are_no_http_close_the_connection(bench):
    sim = bench()
    call = sim.chat()
    call.connection.data_received(b"nonsense\r\n\r\n")
    assert call.transport.is_closed


def test_a_body_too_large_is_refused(bench):
    sim = bench()
    call = sim.send("POST", "/api/v1/chat/completions", b"x" * (MAX_BODY_BYTES + 1))
    assert call.reply.status == 413
    assert call.transport.is_closed


def test_connection_close_and_expect_continue_are_honoured(bench):
    sim = bench()
    call = sim.send("GET", "/api/v1/key", headers={"Connection": "close", "Expect": "100-continue"})
    assert call.transport.written.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert b"Connection: close" in call.transport.written
    assert call.transport.is_closed


def test_models_need_no_key_and_unknown_paths_are_404(bench):
    sim = bench()
    listed = sim.get("/models", key=None).json()["data"]
    assert [model["id"] for model in listed] == [MODEL]
    assert sim.get(f"/models/{MODEL}/endpoints").json()["data"]["endpoints"][0]["pricing"]["prompt"] == "0.000001"
    assert sim.get("/models/acme/none/endpoints").status == 404
    assert sim.get("/nothing").status == 404
    assert sim.send("POST", "/api/v1/key").reply.status == 404
    assert sim.admin("GET", "/nothing").status == 404


def test_the_cache_lifetime_is_checked_and_kept(bench):
    sim = bench()
    body = {"model": MODEL, "messages": user("hi"), "max_tokens": 50}

    def ask(ttl: str):
        headers = {"X-OpenRouter-Cache": "true", "X-OpenRouter-Cache-TTL": ttl}
        return sim.send("POST", "/api/v1/chat/completions", body, headers=headers)

    assert ask("0").reply.status == ask("90000").reply.status == ask("soon").reply.status == 400
    sim.finished(ask("86400"))
    sim.clock.advance(80_000)
    assert ask("86400").reply.headers["x-openrouter-cache-age"] == "80058"


def test_request_body_may_come_in_pieces(bench):
    sim = bench()
    body = json.dumps({"model": MODEL, "messages": user("hi"), "max_tokens": 50}).encode()
    call = sim.send("GET", "/api/v1/key")
    raw = b"POST /api/v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer k\r\n"
    raw += b"Content-Length: %d\r\n\r\n" % len(body) + body
    call.transport.written = b""
    for i in range(len(raw)):
        call.connection.data_received(raw[i : i + 1])
    assert sim.finished(call).json()["choices"][0]["message"]["content"] == "Hi there!"


def test_capacity_falls_back_and_then_refuses(bench):
    sim = bench(providers=[provider("One", capacity=1), provider("Two", capacity=1)])
    calls = [sim.chat() for _ in range(3)]
    refused = calls[2].reply
    assert refused.status == 429
    assert refused.json()["error"]["availability"]["code"] == "capacity_exhausted"
    sim.clock.advance(60)
    assert {calls[0].reply.json()["provider"], calls[1].reply.json()["provider"]} == {"One", "Two"}
    pinned = {"order": ["one"], "allow_fallbacks": False}
    assert sim.chat(provider=pinned).reply is None
    assert sim.chat(provider=pinned).reply.status == 429


def test_token_ids_are_given_only_where_offered_and_asked_for(bench):
    sim = bench(providers=[provider("Open", returns_token_ids=True)])
    choice = sim.finished(sim.chat(return_token_ids=True)).json()["choices"][0]
    assert choice["token_ids"] == [10, 11, 12, 2]
    assert choice["prompt_token_ids"] == [0, 1, 2, 3]
    assert "token_ids" not in sim.finished(sim.chat()).json()["choices"][0]
    sim = bench(providers=[provider("Closed")])
    assert "token_ids" not in sim.finished(sim.chat(return_token_ids=True)).json()["choices"][0]
