# ruff: noqa: E501 - one row a line
"""One row for each catalogued shape of failure: what it means for the sample, the run and the money."""

import json

import pytest

from eagle3.providers.base import RawReply, TransportFailure
from eagle3.providers.classify import Billing, Verdict, classify

PADDING = b"\n         \n" * 3


def reply(
    status: int | None, body: object = b"", *, failure: TransportFailure | None = None, **headers: str
) -> RawReply:
    raw = body if isinstance(body, bytes) else PADDING + json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return RawReply(status=status, headers=names, body=raw, elapsed_s=1.0, failure=failure, message="test")


def error(code: object, message: str = "x", **fields: object) -> dict[str, object]:
    return {"error": {"code": code, "message": message, **fields}}


def choice(
    content: str | None = "hi", finish: str | None = "stop", usage: dict[str, object] | None = None, **more: object
):
    message = {"role": "assistant", "content": content, **more.pop("message", {})}  # type: ignore[dict-item]
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "cost": 0.001} if usage is None else usage
    return {
        "id": "gen-1",
        "provider": "Chutes",
        "model": "m",
        "choices": [{"message": message, "finish_reason": finish, **more}],
        "usage": usage,
    }


PROVIDER_RAW = {"raw": '{"error":"boom"}', "provider_name": "Together"}

ROWS = [
    ("upstream 400 inside 200", reply(200, error(400, "Provider returned error", metadata=PROVIDER_RAW)), Verdict.SAMPLE_REJECTED, Billing.FREE),
    ("upstream 502 inside 200", reply(200, {**error(502, metadata=PROVIDER_RAW), "user_id": "u"}), Verdict.RETRY, Billing.UNKNOWN),
    ("error code is text", reply(200, error("server_error")), Verdict.RETRY, Billing.UNKNOWN),
    ("error code is null", reply(200, error(None)), Verdict.RETRY, Billing.UNKNOWN),
    ("error is a string", reply(200, {"error": "boom"}), Verdict.RETRY, Billing.UNKNOWN),
    ("rate limit inside 200", reply(200, error(429, "temporarily rate-limited upstream")), Verdict.RATE_LIMITED, Billing.FREE),
    ("choice error beside text", reply(200, choice("par", "error", error={"code": 502, "message": "m"})), Verdict.RETRY, Billing.REPORTED),
    ("choice error without usage", {"usage_null": True}, Verdict.RETRY, Billing.UNKNOWN),
    ("finish error only", reply(200, choice("par", "error")), Verdict.RETRY, Billing.REPORTED),
    ("unknown finish reason", reply(200, choice("x", "insufficient_system_resource")), Verdict.BAD_ANSWER, Billing.REPORTED),
    ("content filter", reply(200, choice("", "content_filter")), Verdict.SAMPLE_REJECTED, Billing.REPORTED),
    ("empty stop", reply(200, choice("", "stop")), Verdict.BAD_ANSWER, Billing.REPORTED),
    ("blank", reply(200, choice(None, None)), Verdict.BAD_ANSWER, Billing.REPORTED),
    ("reasoning without content", reply(200, choice("", "stop", message={"reasoning": "r"})), Verdict.ANSWERED, Billing.REPORTED),
    ("encrypted reasoning", reply(200, choice("x", message={"reasoning_details": [{"type": "reasoning.encrypted", "data": "z"}]})), Verdict.SAMPLE_REJECTED, Billing.REPORTED),
    ("summarised reasoning", reply(200, choice("x", message={"reasoning_details": [{"type": "reasoning.summary", "summary": "z"}]})), Verdict.SAMPLE_REJECTED, Billing.REPORTED),
    ("answer", reply(200, choice()), Verdict.ANSWERED, Billing.REPORTED),
    ("answer without usage", reply(200, {**choice(), "usage": None}), Verdict.ANSWERED, Billing.UNKNOWN),
    ("cut by length", reply(200, choice("x", "length")), Verdict.ANSWERED, Billing.REPORTED),
    ("padding only", reply(200, PADDING), Verdict.AMBIGUOUS, Billing.UNKNOWN),
    ("nothing at all", reply(200, b""), Verdict.AMBIGUOUS, Billing.UNKNOWN),
    ("cut JSON", reply(200, PADDING + b'{"id":"gen-1","choices":[{"mess'), Verdict.AMBIGUOUS, Billing.UNKNOWN),
    ("JSON of another kind", reply(200, b"[1, 2]"), Verdict.AMBIGUOUS, Billing.UNKNOWN),
    ("no choices", reply(200, {"id": "gen-1", "choices": []}), Verdict.AMBIGUOUS, Billing.UNKNOWN),
    ("plain text", reply(200, b"upstream says hello"), Verdict.AMBIGUOUS, Billing.UNKNOWN),
    ("400", reply(400, error(400, "context_length_exceeded")), Verdict.SAMPLE_REJECTED, Billing.FREE),
    ("400 unknown model", reply(400, error(400, "foo/bar is not a valid model ID")), Verdict.RUN_REJECTED, Billing.FREE),
    ("400 model by availability", reply(400, error(400, availability={"code": "model_not_found"})), Verdict.RUN_REJECTED, Billing.FREE),
    ("401", reply(401, error(401, "No auth credentials found")), Verdict.CREDENTIALS, Billing.FREE),
    ("402 insufficient", reply(402, error(402, "Insufficient credits. Add more")), Verdict.OUT_OF_CREDITS, Billing.FREE),
    ("402 cannot afford", reply(402, error(402, "This request requires more credits, or fewer max_tokens. You requested up to 65536 tokens, but can only afford 99")), Verdict.OUT_OF_CREDITS, Billing.FREE),
    ("402 prompt limit", reply(402, error(402, "Prompt tokens limit exceeded: 230799 > 91442")), Verdict.SAMPLE_REJECTED, Billing.FREE),
    ("402 inside 200", reply(200, error(402, "Insufficient credits")), Verdict.OUT_OF_CREDITS, Billing.FREE),
    ("403 key limit", reply(403, error(403, "Key limit exceeded (total limit). Manage it using the settings page")), Verdict.OUT_OF_CREDITS, Billing.FREE),
    ("403 monthly limit", reply(403, error(403, "This key's monthly limit is reached")), Verdict.OUT_OF_CREDITS, Billing.FREE),
    ("403 workspace budget", reply(403, error(403, "Workspace budget exceeded")), Verdict.OUT_OF_CREDITS, Billing.FREE),
    ("403 guardrail budget", reply(403, error(403, "Guardrail budget exceeded")), Verdict.OUT_OF_CREDITS, Billing.FREE),
    ("403 moderation", reply(403, error(403, "Your input was flagged", metadata={"reasons": ["violence"], "flagged_input": "x"})), Verdict.SAMPLE_REJECTED, Billing.FREE),
    ("403 guardrail", reply(403, error(403, "blocked by guardrail")), Verdict.SAMPLE_REJECTED, Billing.FREE),
    ("403 region", reply(403, error(403, "region_restricted")), Verdict.RUN_REJECTED, Billing.FREE),
    ("404 tools", reply(404, error(404, "No endpoints found that support tool use")), Verdict.RUN_REJECTED, Billing.FREE),
    ("404 constraint", reply(404, error(404, availability={"code": "constraint_filtered"})), Verdict.RUN_REJECTED, Billing.FREE),
    ("408", reply(408, error(408)), Verdict.RETRY, Billing.FREE),
    ("413", reply(413, error(413)), Verdict.SAMPLE_REJECTED, Billing.FREE),
    ("422", reply(422, error(422)), Verdict.SAMPLE_REJECTED, Billing.FREE),
    ("425", reply(425, b""), Verdict.RETRY, Billing.FREE),
    ("429", reply(429, error(429), retry_after="7"), Verdict.RATE_LIMITED, Billing.FREE),
    ("429 without JSON", reply(429, b"slow down"), Verdict.RATE_LIMITED, Billing.FREE),
    ("503 capacity", reply(503, error(503, availability={"code": "capacity_exhausted", "retryable": True, "retry_after": 9})), Verdict.RATE_LIMITED, Billing.FREE),
    ("404 retryable", reply(404, error(404, availability={"code": "temporarily", "retryable": True})), Verdict.RETRY, Billing.FREE),
    ("500", reply(500, error(500)), Verdict.RETRY, Billing.UNKNOWN),
    ("502", reply(502, error(502, "invalid or empty response")), Verdict.RETRY, Billing.UNKNOWN),
    ("503", reply(503, error(503)), Verdict.RETRY, Billing.FREE),
    ("504", reply(504, error(504)), Verdict.RETRY, Billing.UNKNOWN),
    ("520 HTML", reply(520, b"<html>Error 520</html>"), Verdict.RETRY, Billing.UNKNOWN),
    ("524 HTML", reply(524, b"<!DOCTYPE html><html>timeout</html>"), Verdict.RETRY, Billing.UNKNOWN),
    ("529", reply(529, error(529)), Verdict.RETRY, Billing.FREE),
    ("answer with a status of failure", reply(502, choice()), Verdict.RETRY, Billing.UNKNOWN),
    ("flat error", reply(200, {"object": "error", "message": "no such model", "code": 404}), Verdict.RUN_REJECTED, Billing.FREE),
    ("redirect", reply(302, b""), Verdict.RUN_REJECTED, Billing.FREE),
    ("never sent", reply(None, failure=TransportFailure.NOT_SENT), Verdict.RETRY, Billing.FREE),
    ("cut", reply(200, b'{"id', failure=TransportFailure.CUT), Verdict.AMBIGUOUS, Billing.UNKNOWN),
    ("stalled", reply(None, failure=TransportFailure.STALLED), Verdict.AMBIGUOUS, Billing.UNKNOWN),
    ("deadline", reply(200, PADDING, failure=TransportFailure.DEADLINE), Verdict.AMBIGUOUS, Billing.UNKNOWN),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "verdict", "billing"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_every_catalogued_shape_has_its_class(raw: RawReply, verdict: Verdict, billing: Billing):
    if isinstance(raw, dict):
        raw = reply(200, {**choice("par", "error", error={"code": 502, "message": "m"}), "usage": None})
    outcome = classify(raw)
    assert (outcome.verdict, outcome.billing) == (verdict, billing), outcome


def test_the_longest_hint_to_wait_wins():
    both = reply(429, error(429, availability={"code": "capacity_exhausted", "retry_after": 30}), retry_after="7")
    assert classify(both).retry_after_s == 30
    assert classify(reply(429, error(429), retry_after="7")).retry_after_s == 7
    assert classify(reply(429, error(429), retry_after="Wed, 21 Oct")).retry_after_s is None


def test_the_provider_behind_an_error_is_named():
    assert classify(reply(502, error(502, metadata=PROVIDER_RAW))).provider == "Together"
    earlier = {"provider_name": None, "previous_errors": [{"provider_name": "A"}, {"provider_name": "B"}]}
    assert classify(reply(502, error(502, metadata=earlier))).provider == "B"


def test_the_generation_is_known_from_headers_when_the_body_is_lost():
    lost = reply(200, b"", failure=TransportFailure.CUT, x_generation_id="gen-7")
    assert classify(lost).generation_id == "gen-7"


def test_an_answer_that_names_nobody_is_no_strangers():
    nameless = classify(reply(200, {**choice("hi"), "provider": ""}))
    assert (nameless.verdict, nameless.provider) == (Verdict.ANSWERED, None)


def test_an_answer_without_an_id_has_that_of_its_headers():
    answered = classify(reply(200, {**choice("hi"), "id": None}, x_generation_id="gen-7"))
    assert (answered.verdict, answered.generation_id, answered.code) == (Verdict.ANSWERED, "gen-7", 200)
