"""Streamed replies: recorded real ones, ones that lack something, and errors on the way."""

import json
from decimal import Decimal

import pytest

from eagle3.generation.journal_lines import decode_line, encode_line
from eagle3.providers.base import RawReply
from eagle3.providers.classify import Billing, Verdict, classify
from eagle3.providers.wire import ReplyKind, parse_reply

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "cost": 0.001}
TEXT = {"id": "g", "provider": "Chutes", "choices": [{"index": 0, "delta": {"content": " hi"}}]}
FINISH = {"id": "g", "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]}
COUNTED = {"id": "g", "choices": [], "usage": USAGE}
DONE = "[DONE]"


def stream(*events: object) -> bytes:
    lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}" for event in events]
    return "\n\n".join([": OPENROUTER PROCESSING", *lines, ""]).encode()


def outcome_of(body: bytes):
    return classify(RawReply(status=200, headers={"x-generation-id": "g"}, body=body, elapsed_s=1.0))


def recorded(shared_data) -> list[dict[str, object]]:
    path = shared_data / "recordings" / "openrouter_raw_k25.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")
    return [record for record in map(json.loads, filter(None, lines)) if record["request"].get("stream")]


def test_every_recorded_stream_says_what_its_parsed_twin_says(shared_data):
    lines = (shared_data / "recordings" / "kimi_responses.jsonl").read_text(encoding="utf-8").split("\n")
    twins = [json.loads(line) for line in filter(None, lines)]
    records = recorded(shared_data)
    assert len(records) == 2
    for record in records:
        twin = next(entry for entry in twins if entry["request"] == record["request"])
        parsed = parse_reply(record["raw_body"].encode())
        answer = parsed.answer
        assert parsed.kind is ReplyKind.ANSWER
        assert answer is not None
        assert answer.usage is not None
        message = twin["message"]
        assert answer.reasoning == message["reasoning"]
        assert (answer.content or "") == (message["content"] or "")
        wanted = [(call["id"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        assert [(call.id, call.arguments) for call in answer.tool_calls] == wanted
        assert answer.usage.completion_tokens == twin["usage"]["completion_tokens"]
        assert answer.cost_usd == Decimal(str(twin["usage"]["cost"]))
        assert (answer.finish_reason, answer.provider) == (twin["finish_reason"], twin["provider"])


def test_a_recorded_stream_cut_anywhere_is_no_answer(shared_data):
    for record in recorded(shared_data):
        body = record["raw_body"].encode()
        end = body.index(b"[DONE]") + len(b"[DONE]")
        assert parse_reply(body[:end]).kind is ReplyKind.ANSWER
        for stop in range(0, end, 997):
            assert parse_reply(body[:stop]).kind in (ReplyKind.MALFORMED, ReplyKind.PADDING_ONLY)
        for stop in range(end - 40, end):
            assert parse_reply(body[:stop]).kind is ReplyKind.MALFORMED


@pytest.mark.parametrize(
    ("events", "missing"),
    [
        ((TEXT, COUNTED, DONE), "finish reason"),
        ((TEXT, FINISH, DONE), "usage"),
        ((TEXT, FINISH, COUNTED), "DONE"),
        ((), "cut"),
        ((TEXT, '{"half":'), "cut"),
        ((TEXT, "[1]", DONE), "finish reason"),
    ],
)
def test_a_stream_is_whole_only_with_finish_reason_usage_and_end_mark(events, missing):
    outcome = outcome_of(stream(*events))
    assert (outcome.verdict, outcome.billing) == (Verdict.AMBIGUOUS, Billing.UNKNOWN)
    assert missing in outcome.message
    assert outcome.generation_id == "g"


def test_usage_may_come_with_a_second_finish_reason_or_without_choices():
    second = {**FINISH, "usage": USAGE}
    for events in ((TEXT, FINISH, COUNTED, DONE), (TEXT, FINISH, second, DONE)):
        outcome = outcome_of(stream(*events))
        assert (outcome.verdict, outcome.billing) == (Verdict.ANSWERED, Billing.REPORTED)
        assert outcome.parsed is not None
        assert outcome.parsed.answer is not None
        assert outcome.parsed.answer.content == " hi"
        assert outcome.parsed.answer.cost_usd == Decimal("0.001")


def test_an_error_in_any_event_is_seen_whatever_came_before():
    error = {"id": "g", "error": {"code": 502, "message": "provider went away"}}
    broken = {**error, "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}]}
    for events in ((TEXT, broken), (TEXT, FINISH, broken, DONE), (error, DONE)):
        outcome = outcome_of(stream(*events))
        assert (outcome.verdict, outcome.billing) == (Verdict.RETRY, Billing.UNKNOWN), outcome
        assert "provider went away" in outcome.message


def test_a_surrogate_pair_in_two_events_is_one_character():
    def said(text, arguments):
        delta = {"content": text, "tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}
        return {"id": "g", "choices": [{"delta": delta}]}

    body = stream(said("a\ud83d", '"\ud83d'), said("\ude00 \ud83d", '\ude00"'), FINISH, COUNTED, DONE)
    answer = parse_reply(body).answer
    assert answer.content == "a\U0001f600 \ufffd"
    assert answer.tool_calls[0].arguments == '"\U0001f600"'


HALF = "\ud800"
NAMES = {"id": f"g{HALF}", "provider": f"P{HALF}"}
ERROR = {"code": HALF, "message": f"cut {HALF}", "metadata": {"provider_name": f"P{HALF}"}}


@pytest.mark.parametrize(
    "events",
    [
        ({**TEXT, **NAMES}, {**FINISH, **NAMES}, {**COUNTED, **NAMES}),
        ({**NAMES, "usage": USAGE, "error": ERROR},),
        ({**TEXT, **NAMES}, {**NAMES, "usage": USAGE, "choices": [{"delta": {}, "error": ERROR}]}),
    ],
    ids=["answer", "error", "choice error"],
)
def test_half_a_surrogate_pair_anywhere_can_be_written_down(events):
    body = stream(*events, DONE)
    outcome = outcome_of(body)
    assert outcome.generation_id == "g\ufffd"
    assert outcome.provider == "P\ufffd"
    entry = {"message": outcome.message, "provider": outcome.provider, "id": outcome.generation_id, "raw": body}
    assert decode_line(b"".join(encode_line(entry))) == {**entry, "raw": body.decode()}


def test_calls_that_share_an_index_are_told_apart_by_their_ids():
    def call(**values):
        return {"id": "g", "choices": [{"delta": {"tool_calls": [values]}}]}

    first = call(index=0, id="f:0", function={"name": "f", "arguments": '{"a"'})
    rest = call(index=0, function={"arguments": ": 1}"})
    second = call(index=0, id="f:1", function={"name": "f", "arguments": "{}"})
    end = {"id": "g", "choices": [{"delta": {}, "finish_reason": "tool_calls"}]}
    answer = parse_reply(stream(first, rest, second, end, COUNTED, DONE)).answer
    assert [(each.id, each.arguments) for each in answer.tool_calls] == [("f:0", '{"a": 1}'), ("f:1", "{}")]


def test_a_stream_nested_without_end_is_no_answer():
    assert parse_reply(b"data: " + b"[" * 100_000 + b"\n\ndata: [DONE]\n").kind is ReplyKind.MALFORMED


def test_parts_of_calls_that_are_no_text_are_passed_over():
    odd = {"id": "g", "choices": [{"delta": {"tool_calls": [{"index": "x", "id": "f:0", "function": {"name": 3}}]}}]}
    more = {"id": "g", "choices": [{"token_ids": 3, "delta": {"tool_calls": [3, {"function": {"arguments": 4}}]}}]}
    assert parse_reply(stream(TEXT, odd, more, FINISH, COUNTED, DONE)).answer is not None
