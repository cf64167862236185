"""The look-alike against the official SDK and against recorded real replies."""

import asyncio
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from openrouter import OpenRouter, components, errors, operations
from openrouter.utils import RetryConfig
from openrouter.utils.retries import BackoffStrategy

from eagle3.errors import ConfigurationError
from eagle3.simulator import bodies
from eagle3.simulator.answers import Answer, ToolCall
from eagle3.simulator.habits import render
from eagle3.simulator.process import SimulatorProcess
from eagle3.simulator.scenario import FaultKind, Provider, load_scenario

MODEL = "acme/tiny"
SCENARIO = """
name: shapes
seed: 3
time_scale: 0
generation_lag_s: 0
models: [{id: acme/tiny, suffix: "0101"}]
providers:
  - {name: Plain, tag: plain/bf16, quantization: bf16, prompt_usd_per_mtok: 0.02, completion_usd_per_mtok: 0.05}
  - {name: Unknown, tag: unknown, prompt_usd_per_mtok: 1, completion_usd_per_mtok: 5, status: -1}
  - {name: Faulty, tag: faulty, prompt_usd_per_mtok: 1, completion_usd_per_mtok: 5}
account: {credits_usd: 5, key_limit_usd: 2, management_key: boss}
faults:
"""
STATUS_FAULTS = {
    "http_429": ("TooManyRequestsResponseError", 429),
    "http_500": ("InternalServerResponseError", 500),
    "http_502": ("BadGatewayResponseError", 502),
    "http_503": ("ServiceUnavailableResponseError", 503),
    "http_529": ("ProviderOverloadedResponseError", 529),
}


def record(text: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "prompt_ids": [1, 2, 3],
        "output_ids": [4, 5, 6, 2],
        "text": f"You said {text}.",
        "finish_reason": "stop",
    }


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatorProcess]:
    folder: Path = tmp_path_factory.mktemp("simulator")
    scenario, answers = folder / "scenario.yaml", folder / "answers.jsonl"
    scenario.write_text(SCENARIO + "  []\n")
    answers.write_text("".join(json.dumps(record(text)) + "\n" for text in ("hi", "stream", "raw")))
    with SimulatorProcess(scenario, [answers]) as running:
        yield running


@pytest.fixture
def failing(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SimulatorProcess]:
    scenario, answers = tmp_path / "scenario.yaml", tmp_path / "answers.jsonl"
    scenario.write_text(SCENARIO + f"  - {{kind: {request.param}, share: 1, first_attempts: 99, retry_after_s: 7}}\n")
    answers.write_text(json.dumps(record("hi")) + "\n")
    with SimulatorProcess(scenario, [answers]) as running:
        yield running


def client(simulator: SimulatorProcess, key: str = "k") -> OpenRouter:
    never = RetryConfig("none", BackoffStrategy(1, 1, 1, 1), retry_connection_errors=False)
    return OpenRouter(api_key=key, server_url=simulator.base_url, retry_config=never, timeout_ms=20_000)


def get(simulator: SimulatorProcess, path: str, key: str = "k") -> Any:
    return httpx.get(simulator.base_url + path, headers={"Authorization": f"Bearer {key}"}, trust_env=False).json()


def post(simulator: SimulatorProcess, body: Any) -> httpx.Response:
    headers = {"Authorization": "Bearer k"}
    return httpx.post(f"{simulator.base_url}/chat/completions", headers=headers, json=body, trust_env=False)


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 50, **fields}


def test_the_sdk_client_gets_an_answer(simulator):
    with client(simulator) as sdk:
        reply = sdk.chat.send(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=50)
    assert reply.choices[0].message.content == "You said hi."
    assert reply.usage.completion_tokens == 4
    assert reply.usage.cost > 0


def test_the_sdk_client_reads_a_stream(simulator):
    with (
        client(simulator) as sdk,
        sdk.chat.send(
            model=MODEL, messages=[{"role": "user", "content": "stream"}], max_tokens=50, stream=True
        ) as stream,
    ):
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "You said stream."
    assert chunks[-1].usage.completion_tokens == 4


@pytest.mark.parametrize("failing", list(STATUS_FAULTS), indirect=True)
def test_the_sdk_client_types_each_error(failing, request):
    name, status = STATUS_FAULTS[request.node.callspec.params["failing"]]
    with client(failing) as sdk, pytest.raises(getattr(errors, name)) as caught:
        sdk.chat.send(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=50)
    assert caught.value.data.error.code == status
    assert caught.value.headers.get("retry-after") == ("7" if status in (429, 503) else None)


@pytest.mark.parametrize("failing", ["cut_body", "dropped"], indirect=True)
def test_a_lost_reply_is_a_broken_connection_on_a_real_socket(failing):
    with pytest.raises(httpx.RemoteProtocolError):
        post(failing, chat_body("hi"))
    assert failing.stats()["billed_usd"] != "0"


@pytest.mark.parametrize("failing", ["hang", "silence"], indirect=True)
def test_a_reply_that_never_ends(failing):
    async def ask() -> None:
        async with asyncio.timeout(0.5), httpx.AsyncClient(trust_env=False, timeout=None) as http:
            await http.post(
                f"{failing.base_url}/chat/completions", json=chat_body("hi"), headers={"Authorization": "Bearer k"}
            )

    with pytest.raises(TimeoutError):
        asyncio.run(ask())


def test_refusals_have_the_sdk_shape(simulator):
    refused = post(simulator, chat_body("hi", provider={"only": ["nobody"]}))
    assert refused.status_code == 404
    components.NotFoundResponseErrorData.model_validate(refused.json()["error"])
    bad = post(simulator, chat_body("nobody recorded this"))
    assert bad.status_code == 400
    components.BadRequestResponseErrorData.model_validate(bad.json()["error"])
    nobody = httpx.get(f"{simulator.base_url}/key", trust_env=False)
    assert nobody.status_code == 401
    components.UnauthorizedResponseErrorData.model_validate(nobody.json()["error"])


# The SDK warns about a field of its own model when it reads one.
@pytest.mark.filterwarnings("ignore:.*DEPRECATED:DeprecationWarning")
def test_catalogue_bodies_pass_the_sdk_models(simulator):
    operations.GetCurrentKeyResponse.model_validate(get(simulator, "/key"))
    operations.GetCreditsResponse.model_validate(get(simulator, "/credits", "boss"))
    components.ListEndpointsResponse.model_validate(get(simulator, f"/models/{MODEL}/endpoints")["data"])
    for model in get(simulator, "/models")["data"]:
        components.Model.model_validate(model)
    generation_id = post(simulator, chat_body("raw")).headers["x-generation-id"]
    record_body = get(simulator, f"/generation?id={generation_id}")
    components.GenerationResponse.model_validate(record_body)


def thoughtful(*, with_tools: bool) -> Answer:
    calls = (ToolCall(id="functions.add:0", name="add", arguments='{"a": 2, "b": 3}'),) if with_tools else ()
    return Answer(
        prompt_ids=(1, 2),
        output_ids=tuple(range(12)),
        finish_reason="tool_calls" if with_tools else "stop",
        reasoning="Add them.",
        content=None if with_tools else "5",
        tool_calls=calls,
        num_reasoning_tokens=4,
        is_reasoning_opened=True,
        is_reasoning_closed=True,
        is_ended=True,
    )


def built(answer: Answer, fault: FaultKind | None = None) -> dict[str, Any]:
    provider = Provider(name="P", tag="p", prompt_usd_per_mtok="0.44", completion_usd_per_mtok="2")  # type: ignore[arg-type]
    return bodies.completion(
        render(answer, provider, fault), generation_id="gen-1", created=1, model="m-1", provider="P"
    )


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("fault", [None, FaultKind.EMPTY, FaultKind.BLANK, FaultKind.CONTENT_FILTER])
def test_success_bodies_and_chunks_pass_the_sdk_models(with_tools, fault):
    body = json.loads(bodies.encode(built(thoughtful(with_tools=with_tools), fault)))
    components.ChatResult.model_validate(body)
    for chunk in bodies.chunks_of(body):
        components.ChatStreamChunk.model_validate(chunk)


def test_an_error_in_a_choice_is_visible(simulator):
    body = built(thoughtful(with_tools=False), FaultKind.CHOICE_ERROR)
    assert body["choices"][0]["finish_reason"] == "error"
    assert body["choices"][0]["error"]["code"] == 502
    last = list(bodies.chunks_of(body))[-1]
    assert last["error"]["code"] == 502
    assert last["choices"][0]["finish_reason"] == "error"
    assert "usage" not in last


def key_paths(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {f"{path}{key}" for key in value}.union(*(key_paths(v, f"{path}{k}.") for k, v in value.items()), set())
    if isinstance(value, list):
        return set().union(*(key_paths(item, f"{path}[].") for item in value))
    return set()


def test_key_sets_equal_those_of_recorded_real_replies(shared_data):
    recordings = [
        json.loads(line) for line in (shared_data / "recordings" / "openrouter_raw_k25.jsonl").read_text().splitlines()
    ]
    num_compared = 0
    for real in recordings:
        raw: str = real["raw_body"]
        if real["request"].get("stream"):
            events = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
            with_tools = any("tool_calls" in event["choices"][0]["delta"] for event in events)
            theirs = set().union(*map(key_paths, events))
            ours = set().union(*map(key_paths, bodies.chunks_of(built(thoughtful(with_tools=with_tools)))))
        else:
            assert raw.startswith(bodies.PADDING.decode())
            theirs = key_paths(json.loads(raw))
            with_tools = "choices.[].message.tool_calls" in theirs
            ours = key_paths(built(thoughtful(with_tools=with_tools)))
            assert list(json.loads(raw)) == list(built(thoughtful(with_tools=with_tools)))
        assert ours == theirs
        num_compared += 1
    assert num_compared == 5


@pytest.mark.parametrize("name", ["demo", "faults"])
def test_shipped_scenarios_load(project, name):
    scenario = load_scenario(project / "deployments" / "scenarios" / f"{name}.yaml")
    assert scenario.name == name
    assert len(scenario.providers) >= 3
    assert scenario.faults


def test_process_reports_why_it_did_not_start(tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("models: []\nproviders: []\nsurprise: 1\n")
    with pytest.raises(ConfigurationError, match="surprise"):
        SimulatorProcess(broken).start()


def test_money_refusals_have_the_sdk_shape_and_end_with_a_topup(tmp_path):
    scenario, answers = tmp_path / "s.yaml", tmp_path / "a.jsonl"
    scenario.write_text(SCENARIO.replace("credits_usd: 5", "credits_usd: 0.000001") + "  []\n")
    answers.write_text(json.dumps(record("hi")) + "\n")
    with SimulatorProcess(scenario, [answers]) as running:
        poor = post(running, chat_body("hi"))
        assert poor.status_code == 402
        components.PaymentRequiredResponseErrorData.model_validate(poor.json()["error"])
        running.topup(Decimal(1))
        running.set_key_limit(Decimal(0))
        limited = post(running, chat_body("hi"))
        assert limited.status_code == 403
        components.ForbiddenResponseErrorData.model_validate(limited.json()["error"])
        running.set_key_limit(None)
        assert post(running, chat_body("hi")).status_code == 200


def test_admin_needs_its_token(simulator):
    assert httpx.get(f"{simulator.admin_url}/stats", trust_env=False).status_code == 401
    assert simulator.stats()["in_flight"] == 0


def test_state_survives_a_restart(tmp_path):
    scenario, answers, state = tmp_path / "s.yaml", tmp_path / "a.jsonl", tmp_path / "state.jsonl"
    scenario.write_text(SCENARIO + "  []\n")
    answers.write_text(json.dumps(record("hi")) + "\n")
    with SimulatorProcess(scenario, [answers], state=state) as first:
        generation_id = post(first, chat_body("hi")).headers["x-generation-id"]
        billed = first.stats()["billed_usd"]
    with SimulatorProcess(scenario, [answers], state=state) as second:
        assert second.stats()["billed_usd"] == billed
        assert get(second, f"/generation?id={generation_id}")["data"]["id"] == generation_id
