"""Reading replies: recorded real ones, odd ones, and any bytes at all."""

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.providers.wire import ReplyKind, parse_reply
from eagle3.records import ToolCall, Usage


def body(**message: object) -> bytes:
    choices = [{"message": message, "finish_reason": "stop"}]
    return json.dumps({"id": "g", "choices": choices, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()


@given(st.binary(max_size=200))
def test_no_bytes_make_it_raise(data: bytes):
    parse_reply(data)


NAMES = ["id", "choices", "error", "message", "usage", "code", "metadata", "finish_reason", "content"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_no_json_makes_it_raise(value: object):
    parse_reply(json.dumps(value).encode())


def test_text_is_never_stripped():
    answer = parse_reply(b"\n         \n" + body(content=" hi \n", reasoning=" The user")).answer
    assert answer is not None
    assert (answer.content, answer.reasoning) == (" hi \n", " The user")


def test_reasoning_is_taken_once_from_whatever_name_it_has():
    spellings = [
        {"reasoning": "r"},
        {"reasoning_content": "r"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "r"}]},
        {
            "reasoning": "r",
            "reasoning_content": "other",
            "reasoning_details": [{"type": "reasoning.text", "text": "r"}],
        },
    ]
    for spelling in spellings:
        answer = parse_reply(body(content="c", **spelling)).answer
        assert answer is not None
        assert answer.reasoning == "r"


def test_tool_arguments_stay_verbatim():
    call = {"id": "functions.a:0", "function": {"name": "a", "arguments": '{"x": 1,"y":2}'}}
    answer = parse_reply(body(content=None, tool_calls=[call])).answer
    assert answer is not None
    assert answer.tool_calls == (ToolCall(id="functions.a:0", name="a", arguments='{"x": 1,"y":2}'),)


def test_native_ids_are_found_under_both_engines_names():
    vllm = {
        "prompt_token_ids": [1],
        "choices": [{"message": {"content": "c"}, "finish_reason": "stop", "token_ids": [2]}],
    }
    inner = {"message": {"content": "c"}, "finish_reason": "stop", "response_token_ids": [2], "prompt_token_ids": [1]}
    meta = {"prompt_token_ids": [1], "output_token_ids": [2]}
    sglang = {"message": {"content": "c"}, "finish_reason": "stop", "meta_info": meta}
    for document in (vllm, {"choices": [inner]}, {"choices": [sglang]}):
        answer = parse_reply(json.dumps(document).encode()).answer
        assert answer is not None
        assert (answer.prompt_token_ids, answer.completion_token_ids) == ((1,), (2,))


def test_every_count_of_the_usage_is_read():
    details = {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 4}}
    flat = {"prompt_tokens": 1, "completion_tokens": 2, "reasoning_tokens": 4}
    for usage, cached in (({**flat, **details}, 3), (flat, None)):
        document = {"choices": [{"message": {"content": "c"}, "finish_reason": "stop"}], "usage": usage}
        answer = parse_reply(json.dumps(document).encode()).answer
        assert answer is not None
        assert answer.usage == Usage(prompt_tokens=1, completion_tokens=2, reasoning_tokens=4, cached_tokens=cached)


def test_cost_is_decimal_as_spelled():
    document = b'{"choices":[{"message":{"content":"c"},"finish_reason":"stop"}],"usage":{"cost":0.00012345}}'
    answer = parse_reply(document).answer
    assert answer is not None
    assert answer.cost_usd == Decimal("0.00012345")


def test_every_recorded_real_reply_is_an_answer(shared_data):
    lines = (shared_data / "recordings" / "openrouter_raw_k25.jsonl").read_text(encoding="utf-8").split("\n")
    records = [record for record in map(json.loads, filter(None, lines)) if not record["request"].get("stream")]
    assert records
    for record in records:
        parsed = parse_reply(record["raw_body"].encode())
        document = json.loads(record["raw_body"])
        message, usage = document["choices"][0]["message"], document["usage"]
        assert parsed.kind is ReplyKind.ANSWER
        answer = parsed.answer
        assert answer is not None
        assert answer.usage is not None
        assert (answer.reasoning, answer.content) == (message["reasoning"], message["content"])
        assert [call.arguments for call in answer.tool_calls] == [
            call["function"]["arguments"] for call in message.get("tool_calls") or []
        ]
        assert answer.usage.completion_tokens == usage["completion_tokens"]
        assert answer.cost_usd == Decimal(str(usage["cost"]))
        assert answer.provider == document["provider"]


@pytest.mark.parametrize("ids", [5, "123", [1, "2"], [True], {}])
def test_ids_of_another_shape_are_no_ids(ids):
    choice = {"message": {"content": "c"}, "finish_reason": "stop", "meta_info": {"output_token_ids": ids}}
    answer = parse_reply(json.dumps({"id": "g", "choices": [choice]}).encode()).answer
    assert answer is not None
    assert answer.completion_token_ids is None


@pytest.mark.parametrize("code", ["\u00b2", "9" * 5000])
def test_a_code_that_only_looks_like_a_number_is_no_code(code):
    parsed = parse_reply(json.dumps({"error": {"code": code, "message": "m"}}).encode())
    assert parsed.error is not None
    assert parsed.error.code is None


def test_a_wait_that_no_clock_knows_is_no_wait():
    availability = {"code": "capacity_exhausted", "retry_after": 10**400}
    parsed = parse_reply(json.dumps({"error": {"code": 429, "message": "m", "availability": availability}}).encode())
    assert parsed.error is not None
    assert parsed.error.retry_after_s is None
