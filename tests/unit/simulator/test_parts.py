"""Scenario files, routing, the account, text habits, answers and state, each on its own."""

import json
from decimal import Decimal

import pytest

from eagle3.errors import ConfigurationError, InputError
from eagle3.simulator.account import Account
from eagle3.simulator.answers import Answer, AnswerTooLongError, ToolCall, cut_answer, load_answers
from eagle3.simulator.habits import apply_habits, render
from eagle3.simulator.routing import MalformedRoutingError, route
from eagle3.simulator.scenario import Provider, load_scenario
from eagle3.simulator.state import State
from tests.unit.simulator.conftest import ManualClock, plain_answer, provider, tiny_scenario, user


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"surprise": 1}, "surprise"),
        ({"models": []}, "models"),
        ({"models": [{"id": "no-slash", "suffix": "1"}]}, "models.0.id"),
        ({"providers": [provider("A"), provider("A")]}, "listed twice"),
        ({"providers": [provider("A", models=["acme/other"])]}, "acme/other"),
        ({"faults": [{"kind": "http_502", "share": 1.5}]}, "faults.0.share"),
        ({"faults": [{"kind": "explode", "share": 0.5}]}, "faults.0.kind"),
        ({"faults": [{"kind": "http_502", "share": 0.5, "provider": "nobody"}]}, "nobody"),
        ({"faults": [{"kind": "empty", "share": 0.5, "billed": False}]}, "billed"),
        ({"time_scale": -1}, "time_scale"),
    ],
)
def test_faulty_scenarios_are_refused_with_the_field(tmp_path, change, complaint):
    good = tiny_scenario().model_dump(mode="json")
    path = tmp_path / "scenario.yaml"
    path.write_text(json.dumps(good))
    assert load_scenario(path).seed == 7
    path.write_text(json.dumps({**good, **change}))
    with pytest.raises(ConfigurationError, match=complaint):
        load_scenario(path)


def test_scenario_files_that_are_none(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_scenario(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigurationError, match="not YAML"):
        load_scenario(tmp_path / "bad.yaml")


ENDPOINTS = [
    Provider.model_validate(entry)
    for entry in (
        provider("Alpha", tag="alpha/bf16", quantization="bf16"),
        provider("Beta", tag="beta/fp8", quantization="mxfp8", completion_usd_per_mtok=4),
        provider("Gamma", tag="gamma/fp4", quantization="nvfp4"),
        provider("Delta", tag="delta", max_completion_tokens=100, supported_parameters=["temperature", "max_tokens"]),
        provider("Down", tag="down", status=-2),
    )
]


def routed(**request) -> list[str]:
    return [p.name for p in route(request, ENDPOINTS, seed=1, body_digest="b").providers]


@pytest.mark.parametrize(
    ("preferences", "expected"),
    [
        ({}, {"Alpha", "Beta", "Gamma", "Delta"}),
        ({"only": ["alpha"]}, {"Alpha"}),
        ({"only": ["ALPHA/bf16", "Beta"]}, {"Alpha", "Beta"}),
        ({"ignore": ["alpha", "delta"]}, {"Beta", "Gamma"}),
        ({"quantizations": ["fp8"]}, {"Beta"}),
        ({"quantizations": ["fp4", "unknown"]}, {"Gamma", "Delta"}),
        ({"max_price": {"completion": 2}}, {"Alpha", "Gamma", "Delta"}),
        ({"max_price": {"prompt": "1.0", "completion": "2.0"}}, {"Alpha", "Gamma", "Delta"}),
        ({"order": ["beta"], "allow_fallbacks": False}, {"Beta"}),
    ],
)
def test_who_may_answer(preferences, expected):
    assert set(routed(provider=preferences)) == expected


@pytest.mark.parametrize(
    ("request_body", "constraint"),
    [
        ({"provider": {"only": ["nobody"]}}, "provider"),
        ({"provider": {"quantizations": ["int4"]}}, "quantizations"),
        ({"provider": {"max_price": {"prompt": 0.5}}}, "max_price"),
        ({"provider": {"only": ["delta"]}, "tools": [{"type": "function"}]}, "tools"),
        ({"provider": {"only": ["delta"], "require_parameters": True}, "top_k": 1}, "require_parameters"),
        ({"max_tokens": 100_000}, "max_tokens"),
    ],
)
def test_nobody_may_answer(request_body, constraint):
    result = route(request_body, ENDPOINTS, seed=1, body_digest="b")
    assert result.constraint == constraint
    assert result.refusal
    assert not result.providers


def test_unsupported_parameters_are_dropped_silently_unless_required():
    assert "Delta" in routed(top_k=1)


def test_order_and_sort():
    assert routed(provider={"order": ["gamma", "beta"]})[:2] == ["Gamma", "Beta"]
    assert routed(provider={"sort": "price"})[-1] == "Beta"
    assert routed(provider={"sort": {"by": "price"}})[-1] == "Beta"


def test_cheap_endpoints_are_drawn_by_the_square_of_their_price():
    pair = [
        Provider.model_validate(provider(n, prompt_usd_per_mtok=p, completion_usd_per_mtok=0))
        for n, p in (("A", 1), ("B", 2))
    ]
    firsts = [route({}, pair, seed=1, body_digest=str(i)).providers[0].name for i in range(4000)]
    assert firsts.count("A") / 4000 == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize(
    "preferences",
    ["x", {"only": "alpha"}, {"max_price": 3}, {"max_price": {"prompt": "cheap"}}, {"max_price": {"prompt": "NaN"}}],
)
def test_malformed_preferences(preferences):
    with pytest.raises(MalformedRoutingError):
        routed(provider=preferences)


def test_no_route_is_a_404_in_the_real_shape(bench):
    sim = bench()
    reply = sim.chat(provider={"quantizations": ["int4"]}).reply
    assert reply.status == 404
    assert reply.json()["error"]["availability"]["code"] == "constraint_filtered"


def test_the_account_refuses_by_credits_and_by_key():
    account = Account(credits_usd=Decimal(1), key_limit_usd=None)
    ask = {"completion_usd_per_mtok": Decimal(1000)}
    assert account.refuse(max_tokens=1000, **ask) is None
    refusal = account.refuse(max_tokens=1001, **ask)
    assert refusal.status == 402
    assert "requested up to 1001 tokens, but can only afford 1000" in refusal.message
    account.bill(Decimal("1.5"))
    assert account.refuse(max_tokens=1, **ask).message.startswith("Insufficient credits")
    account.credits_usd += 10
    assert account.refuse(max_tokens=1000, **ask) is None
    account.key_limit_usd = Decimal("1.6")
    assert "keys" in account.refuse(max_tokens=1000, **ask).message
    account.key_limit_usd = Decimal("1.5")
    limited = account.refuse(max_tokens=1, **ask)
    assert limited.status == 403
    assert "Key limit exceeded" in limited.message


def test_money_runs_out_and_a_topup_goes_on(bench):
    sim = bench(account={"credits_usd": "0.000110"})
    assert sim.finished(sim.chat()).status == 200
    refused = sim.chat().reply
    assert refused.status == 402
    assert "can only afford 49" in refused.json()["error"]["message"]
    assert sim.admin("POST", "/topup", {"usd": "1"}).json()["credits_usd"] == "1.000110"
    assert sim.finished(sim.chat()).status == 200
    sim.admin("POST", "/key_limit", {"usd": 0.00002})
    assert sim.chat().reply.status == 403
    assert sim.get("/key").json()["data"]["limit_remaining"] == 0
    sim.admin("POST", "/key_limit", {"usd": None})
    assert sim.finished(sim.chat()).status == 200
    assert sim.admin("GET", "/stats").json()["statuses"] == {"200": 3, "402": 1, "403": 1}
    assert sim.admin("POST", "/reset").json()["billed_usd"] == "0"


@pytest.mark.parametrize("body", [{"usd": -1}, {"usd": "many"}, {"usd": "NaN"}, {}, []])
def test_admin_refuses_nonsense(bench, body):
    assert bench().admin("POST", "/topup", body).status == 400


def test_admin_needs_its_token(bench):
    assert bench().admin("GET", "/truth", token="guess").status == 401


def habit(**changes) -> Provider:
    return Provider.model_validate(provider("P", **changes))


def thinking(**changes) -> Answer:
    fields = {
        "prompt_ids": (1,),
        "output_ids": (1, 2, 3, 4),
        "finish_reason": "stop",
        "reasoning": "because",
        "content": "so",
        "is_reasoning_opened": True,
        "is_reasoning_closed": True,
        "is_ended": True,
        **changes,
    }
    return Answer(**fields)


def test_verbatim_changes_nothing():
    assert apply_habits(thinking(), habit())[:2] == ("because", "so")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (thinking(), (" because ", " so ")),
        (thinking(is_ended=False, finish_reason="length"), (" because ", " so")),
        (thinking(is_reasoning_closed=False, content=None, is_ended=False), (" because", None)),
        (thinking(reasoning=""), ("", " so ")),
        (thinking(reasoning=None, is_reasoning_opened=False, is_reasoning_closed=False), (None, "so ")),
        (thinking(content="", tool_calls=(ToolCall(id="i", name="n", arguments="{}"),)), (" because ", "")),
        (plain_answer("cut"), (None, "cut ")),
    ],
)
def test_spaces_around_control_tokens(answer, expected):
    assert apply_habits(answer, habit(space_around_control_tokens=True))[:2] == expected


@pytest.mark.parametrize(
    ("style", "expected"),
    [("verbatim", '{"a":1, "é": [1,2]}'), ("compact", '{"a":1,"é":[1,2]}'), ("spaced", '{"a": 1, "é": [1, 2]}')],
)
def test_tool_arguments(style, expected):
    call = ToolCall(id="i", name="n", arguments='{"a":1, "é": [1,2]}')
    assert apply_habits(thinking(tool_calls=(call,)), habit(tool_arguments=style))[2][0].arguments == expected
    broken = ToolCall(id="i", name="n", arguments='{"a":')
    assert apply_habits(thinking(tool_calls=(broken,)), habit(tool_arguments=style))[2][0].arguments == '{"a":'


def test_the_end_token_may_be_unbilled():
    assert render(plain_answer(), habit()).completion_tokens == 4
    assert render(plain_answer(), habit(end_token_billed=False)).completion_tokens == 3
    unended = thinking(is_ended=False, finish_reason="length")
    assert render(unended, habit(end_token_billed=False)).completion_tokens == 4


LINE = {"messages": user("hi"), "prompt_ids": [1], "output_ids": [5, 6, 2], "text": "ab", "finish_reason": "stop"}


def test_recorded_lines_are_found_by_messages_whatever_their_key_order(tmp_path, bench):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({**LINE, "messages": [{"content": "hé", "role": "user"}]}, ensure_ascii=False) + "\n\n")
    sim = bench(answers=load_answers([path]))
    assert sim.finished(sim.chat("hé")).json()["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        json.dumps({**LINE, "output_ids": []}),
        json.dumps({**LINE, "finish_reason": "boredom"}),
        '{"output_ids":[1]}',
    ],
)
def test_malformed_answer_lines_are_named(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + line + "\n")
    with pytest.raises(InputError, match="line 2"):
        load_answers([path])


def test_scripted_lines_need_a_tokenizer(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"messages": user("hi"), "content": "x", "finish_reason": "stop"}) + "\n")
    with pytest.raises(ConfigurationError, match="--tokenizer and --grammar"):
        load_answers([path])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_answers([tmp_path / "absent.jsonl"])


def test_a_smaller_max_tokens_cuts_the_ids():
    answer = plain_answer()
    assert cut_answer(answer, 4, None) is answer
    short = cut_answer(answer, 2, lambda ids: f"<{len(ids)}>")
    assert (short.output_ids, short.content, short.finish_reason, short.is_ended) == ((10, 11), "<2>", "length", False)
    with pytest.raises(AnswerTooLongError, match="has 4 tokens, the request allows 3"):
        cut_answer(answer, 3, None)


def test_a_cut_that_needs_a_tokenizer_is_a_400(bench):
    reply = bench().chat(max_tokens=3).reply
    assert reply.status == 400
    assert "--tokenizer" in reply.json()["error"]["message"]


def test_a_restart_keeps_account_cache_attempts_and_generations(bench, tmp_path):
    path, clock = tmp_path / "state.jsonl", ManualClock()
    faults = [{"kind": "http_502", "share": 1}]
    first = bench(state_file=path, faults=faults, clock=clock)
    assert first.finished(first.chat(cached=True)).status == 502
    answered = first.finished(first.chat(cached=True))
    first.admin("POST", "/topup", {"usd": 2})
    first.admin("POST", "/key_limit", {"usd": 1})
    first.state.flush()

    second = bench(state_file=path, faults=faults, clock=clock)
    assert second.state.account.usage_usd == first.state.account.usage_usd > 0
    assert second.state.account.credits_usd == 3
    assert second.state.account.key_limit_usd == 1
    assert second.state.generations == first.state.generations
    assert second.chat(cached=True).reply.json()["choices"] == answered.json()["choices"]
    assert second.finished(second.chat()).status == 200, "the first attempt was spent before the restart"


def test_a_torn_last_line_is_dropped_and_a_foreign_file_refused(tmp_path):
    start, path = tiny_scenario().account, tmp_path / "state.jsonl"
    path.write_bytes(b'{"attempt":"a"}\n{"attempt":"b')
    state = State(start, path)
    assert state.attempts == {"a": 1}
    state.take_attempt("a")
    state.flush()
    assert State(start, path).attempts == {"a": 2}
    path.write_text('{"hello": 1}\n')
    with pytest.raises(ConfigurationError, match="line 1 is not one of ours"):
        State(start, path)


def test_reset_is_remembered(bench, tmp_path):
    sim = bench(state_file=tmp_path / "state.jsonl")
    sim.finished(sim.chat())
    sim.admin("POST", "/reset")
    sim.state.flush()
    assert State(sim.scenario.account, tmp_path / "state.jsonl").account.usage_usd == 0
