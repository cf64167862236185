"""Lines of every shape become completions; a bad line becomes a visible record."""

import json

import pytest

from eagle3.errors import InputError
from eagle3.loose.reading import parse_line, read_loose_replies


def parsed(value, number=1):
    return parse_line(number, value if isinstance(value, bytes) else json.dumps(value).encode())


def rules(reply):
    return [finding.rule for finding in reply.findings]


def test_parsed_reply(line):
    reply = parsed(line())
    assert (reply.provider, reply.model, reply.line) == ("Acme", "acme/tiny", 1)
    assert (reply.completion.reasoning, reply.completion.content) == ("Hm", "Hi")
    assert reply.completion.usage.completion_tokens == 6
    assert reply.findings == ()


BODY = {
    "id": "gen-1",
    "model": "acme/tiny-0101",
    "provider": "Acme",
    "choices": [{"message": {"content": "Hi", "reasoning": "Hm"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 6},
}


@pytest.mark.parametrize("key", ["raw_body", "response"])
@pytest.mark.parametrize("as_text", [True, False])
def test_whole_bodies(line, key, as_text):
    request = line()["request"]
    body = "\n  \n" + json.dumps(BODY) if as_text else BODY
    reply = parsed({"source": "x", "i": 0, "headers": {}, "request": request, key: body})
    assert (reply.provider, reply.model, reply.reply_model) == ("Acme", "acme/tiny", "acme/tiny-0101")
    assert reply.completion.generation_id == "gen-1"
    assert reply.findings == ()


def test_body_as_the_line():
    reply = parsed(BODY)
    assert reply.completion.content == "Hi"
    assert reply.model == "acme/tiny-0101"
    assert reply.prompt.messages == []


def events(*deltas, usage=True):
    made = [
        {"model": "m", "provider": "Acme", "choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    made.append({"choices": [{"delta": {"content": ""}, "finish_reason": "tool_calls"}]})
    if usage:
        made.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}})
    return ": KEEP ALIVE\n\n" + "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in made) + "data: [DONE]\n\n"


def test_streamed_body(line):
    calls = [
        {"tool_calls": [{"index": 0, "id": "functions.f:0", "function": {"name": "f", "arguments": '{"a'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]},
        {"tool_calls": [{"index": 1, "id": "functions.g:1", "function": {"name": "g", "arguments": "{}"}}]},
    ]
    text = events({"reasoning": " H"}, {"reasoning": "m\u2028"}, {"content": "W"}, {"content": "ait"}, *calls)
    completion = parsed({"request": line()["request"], "raw_body": text}).completion
    assert (completion.reasoning, completion.content) == (" Hm\u2028", "Wait")
    assert [(call.id, call.name, call.arguments) for call in completion.tool_calls] == [
        ("functions.f:0", "f", '{"a": 1}'),
        ("functions.g:1", "g", "{}"),
    ]
    assert (completion.finish_reason, completion.usage.completion_tokens) == ("tool_calls", 9)


def test_stream_without_usage_is_unbilled(line):
    reply = parsed({"request": line()["request"], "raw_body": events({"content": "Hi"}, usage=False)})
    assert reply.completion.usage.completion_tokens == 0
    assert "no-usage" in rules(reply)


@pytest.mark.parametrize(
    "value",
    [
        b"{not json",
        b"\xff\xfe",
        b"[" * 100_000,
        [1],
        "text",
        None,
        {},
        {"message": "text"},
        {"raw_body": ""},
        {"raw_body": ": KEEP ALIVE\n\n"},
        {"raw_body": "data: [DONE]\n\n"},
        {"raw_body": "data: {cut"},
        {"raw_body": "<html>502</html>"},
        {"response": {"choices": []}},
        {"response": {"error": {"code": 502, "message": "bad gateway"}}},
        {"message": {"content": "half \ud800"}, "finish_reason": "stop"},
        {"message": {"content": 7}, "finish_reason": "stop"},
    ],
)
def test_bad_lines_are_records(value):
    reply = parsed(value, 7)
    assert reply.completion is None
    assert rules(reply)[-1] == "bad-line"
    assert reply.prompt.sample_id == "line-7"


@pytest.mark.parametrize("usage", [None, {}, "n/a", {"completion_tokens": None}, {"completion_tokens": 10**30}, 5])
def test_missing_usage_is_told(line, usage):
    reply = parsed(line(usage=usage))
    assert reply.completion.usage.completion_tokens == 0
    assert rules(reply) == ["no-usage"]


@pytest.mark.parametrize(
    ("finish", "expected"),
    [("content_filter", "content_filter"), ("eos", "eos"), (None, "missing"), (3, "3")],
)
def test_odd_finish_reasons_are_told(line, finish, expected):
    reply = parsed(line(finish_reason=finish))
    assert reply.completion.finish_reason == expected
    assert rules(reply) == ["finish-reason"]


@pytest.mark.parametrize("content", [None, ""])
def test_null_content(line, content):
    message = {"content": content, "reasoning": "Hm"}
    assert not parsed(line(message=message)).completion.content
    assert rules(parsed(line(message={"content": content}))) == ["empty-reply"]


def test_oddities_of_messages(line):
    parts = [{"type": "text", "text": "H"}, {"type": "image"}, {"type": "text", "text": "i"}]
    assert parsed(line(message={"content": parts})).completion.content == "Hi"
    assert parsed(line(message={"content": "Hi", "reasoning_content": "Hm"})).completion.reasoning == "Hm"
    call = {"id": "f:0", "function": {"name": "f", "arguments": {"a": 1}}}
    reply = parsed(line(message={"content": None, "tool_calls": [call]}, finish_reason="tool_calls"))
    assert reply.completion.tool_calls[0].arguments == '{"a": 1}'
    assert rules(reply) == ["arguments-parsed"]
    sealed = {"content": "Hi", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}
    assert rules(parsed(line(message=sealed))) == ["partial-reasoning"]


def test_unknown_provider_and_model():
    reply = parsed({"message": {"content": "Hi"}, "finish_reason": "stop", "usage": {"completion_tokens": 2}})
    assert (reply.provider, reply.model) == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, None),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "high"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"enable_thinking": False}, False),
    ],
)
def test_what_requests_say_about_thinking(line, options, wanted):
    assert parsed(line(request={"model": "m", **options})).wants_thinking is wanted


def test_token_ids_and_logprobs_are_read(line):
    logprobs = {"content": [{"token": "Hi", "bytes": [72, 105]}]}
    completion = parsed(line(token_ids=[1, 2], logprobs=logprobs)).completion
    assert completion.completion_token_ids == (1, 2)
    assert completion.token_bytes == (b"Hi",)


def test_files(tmp_path, line, write):
    path = write(line(), b"", b"   ", b"{", line(content="text with \u2028 and \u0085"))
    found = read_loose_replies(path)
    assert [reply.line for reply in found] == [1, 4, 5]
    with pytest.raises(InputError, match="cannot be read"):
        read_loose_replies(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(InputError, match="holds no line"):
        read_loose_replies(tmp_path / "empty.jsonl")
