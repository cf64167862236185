"""Habits stop a run, scattered drift does not; both sides of every provider rule."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from eagle3.audit.provider_rules import Evidence, audit_providers, evidence_of, lower_bound
from eagle3.audit.subject import Subject, TokenRules
from eagle3.recipe import Audit, OpenAICompatible, OpenRouter, Routing
from eagle3.records import Exactness, Severity

SETTINGS = Audit()
ASKED = OpenRouter(model="tiny/model", routing=Routing(quantizations=("bf16",)))


def sample(number: int, delta: int | None = 0, **values: Any) -> Evidence:
    fields: dict[str, Any] = {
        "sample_id": f"s{number}",
        "provider": "Acme",
        "model": "tiny/model",
        "quantization": "bf16",
        "exactness": Exactness.MISMATCH if delta else Exactness.COUNT_VERIFIED,
        "delta": delta,
        "prompt_delta": 0,
        "kinds": frozenset({"answers"}),
        "num_edges": {"start": 1, "end": 1},
        "num_spaced_edges": {"start": 0, "end": 0},
    }
    return Evidence(**{**fields, **values})


def samples(deltas: Sequence[int], **values: Any) -> list[Evidence]:
    return [sample(number, delta, **values) for number, delta in enumerate(deltas)]


def found(evidence, *, profiles=(), settings=SETTINGS, provider=ASKED) -> dict[str, Severity]:
    findings = audit_providers(evidence, profiles, settings, provider)
    return {finding.rule: finding.severity for finding in findings}


def test_a_clean_provider_has_no_finding(profile_of):
    assert found(samples([0] * 50), profiles=[profile_of("Acme", "thinking")]) == {}


@pytest.mark.parametrize("deltas", [[-1], [-1, 1], [3, 3]])
def test_up_to_two_mismatches_never_make_a_provider_finding(deltas):
    assert found(samples(deltas)) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        [-1, 1, -2, 2, -1],
        [-1] * 5,
        [-1, -1, -1],
    ],
)
def test_scattered_drift_of_five_percent_is_a_warning_only(wrong):
    assert found(samples([*wrong, *[0] * (100 - len(wrong))])) == {"A05": Severity.WARNING}


def test_three_of_ten_are_no_proof_of_more_than_a_tenth_and_three_of_three_are():
    assert found(samples([-1, 1, -2, *[0] * 7])) == {"A05": Severity.WARNING}
    assert found(samples([-1, 1, -2]))["A05"] is Severity.CRITICAL


def test_a_large_share_is_critical_even_when_scattered_and_the_recipe_can_allow_it():
    evidence = samples([*[(-1, 1, -2, 2)[index % 4] for index in range(30)], *[0] * 70])
    assert found(evidence) == {"A05": Severity.CRITICAL}
    assert found(evidence, settings=Audit(max_drift_share=0.5)) == {"A05": Severity.WARNING}


def test_a_share_below_the_limit_is_left_to_the_sample_rule():
    assert found(samples([*[-1] * 4, *[0] * 996])) == {}
    assert found(samples([*[-1] * 6, *[0] * 994])) == {"A05": Severity.WARNING}


def test_a06_one_offset_in_most_answers_is_a_habit():
    evidence = samples([*[1] * 60, *[0] * 40])
    assert found(evidence, settings=Audit(max_drift_share=1.0))["A06"] is Severity.CRITICAL


def test_a06_one_offset_in_most_answers_of_one_kind_is_a_habit():
    called = frozenset({"answers", "answers with tool calls"})
    evidence = [*samples([-6] * 4, kinds=called), *samples([0] * 96)]
    findings = audit_providers(evidence, (), SETTINGS, ASKED)
    habit = next(finding for finding in findings if finding.rule == "A06")
    assert habit.severity is Severity.CRITICAL
    assert habit.provider == "Acme"
    assert "4 of 4 answers with tool calls have -6 ids" in habit.detail
    mixed = [*samples([-6, 1, -1, 2], kinds=called), *samples([0] * 96)]
    assert "A06" not in found(mixed)


def test_replies_that_could_not_be_rebuilt_count_as_mismatches():
    lost = [sample(number, None, exactness=Exactness.MISMATCH) for number in range(20)]
    assert found(lost) == {"A05": Severity.CRITICAL}


def test_ids_given_by_the_server_are_not_held_against_the_bill():
    assert found([sample(number, None, exactness=Exactness.EXACT_IDS) for number in range(20)]) == {}


def test_a07_unknown_habits(profile_of):
    assert found(samples([0]), profiles=[profile_of("Acme", "thinking", unknown=["head_space"])]) == {
        "A07": Severity.WARNING
    }
    assert found(samples([0]), profiles=[profile_of("Other", "thinking", unknown=["head_space"])]) == {}


def test_a08_another_chat_template():
    assert found([*samples([0] * 4, prompt_delta=-7), *samples([0] * 90)]) == {"A08": Severity.CRITICAL}
    assert found([*samples([0] * 2, prompt_delta=-7), *samples([0] * 8)]) == {}


@pytest.mark.parametrize(("edge", "axis"), [("start", "head_space"), ("end", "tail_space")])
def test_a09_spaces_of_unknown_origin(profile_of, edge, axis):
    spaced = samples([0] * 20, num_spaced_edges={"start": 0, "end": 0, edge: 1})
    unknown = [profile_of("Acme", "thinking", unknown=[axis])]
    findings = [each for each in audit_providers(spaced, unknown, SETTINGS, ASKED) if each.rule == "A09"]
    assert [each.severity for each in findings] == [Severity.WARNING, *[Severity.ERROR] * 20]
    masked = [replace(each, exactness=Exactness.COUNT_AMBIGUOUS) for each in spaced]
    assert found(masked, profiles=unknown)["A09"] is Severity.WARNING
    assert "A09" not in found(spaced, profiles=[profile_of("Acme", "thinking")])
    assert "A09" not in found([*spaced[:18], *samples([0] * 2)], profiles=unknown)


def test_a19_origin_of_answers():
    assert found(samples([0], quantization="fp4")) == {"A19": Severity.CRITICAL}
    assert found(samples([0], quantization=None)) == {}
    assert found([*samples([0]), *samples([0], model="tiny/model-0127")]) == {"A19": Severity.CRITICAL}
    assert found(samples([0], model="tiny/model-0127")) == {}
    assert found(samples([0], model="huge/model")) == {"A19": Severity.CRITICAL}
    only = replace_routing(only=("z-ai/fp8",))
    assert found(samples([0]), provider=only) == {"A19": Severity.CRITICAL}
    assert found(samples([0], provider="Z.AI"), provider=only) == {}
    assert found(samples([0]), provider=replace_routing(ignore=("acme",))) == {"A19": Severity.CRITICAL}


def test_a19_local_servers_name_models_their_own_way():
    local = OpenAICompatible(base_url="http://localhost:8000/v1", model="tiny")
    assert found(samples([0], model="/models/tiny", quantization=None), provider=local) == {}


def test_a20_reports_what_reasoning_tokens_count():
    assert found(samples([0], reasoning_offset=1)) == {"A20": Severity.INFO}


def replace_routing(**values: Any) -> OpenRouter:
    return ASKED.model_copy(update={"routing": ASKED.routing.model_copy(update=values)})


def test_lower_bound_of_a_share():
    assert lower_bound(0, 0) == 0.0
    assert lower_bound(0, 10) == pytest.approx(0.0, abs=1e-12)
    assert 0.08 < lower_bound(3, 10) < 0.1
    assert lower_bound(3, 3) > 0.35
    assert lower_bound(5000, 10_000) == pytest.approx(0.5, abs=0.02)


def test_evidence_of_a_sample(tiny_run):
    prompt = tiny_run.prompt("Is tea hot?")
    completion = tiny_run.completion(prompt, reasoning=" I think so.", content="  Yes.", delta=2)
    rules = TokenRules(tiny_run.renderer.grammar, tiny_run.renderer.tokenizer, "thinking")
    subject = Subject(prompt, completion, tiny_run.sample(prompt, completion), rules)
    evidence = evidence_of(subject)
    assert (evidence.delta, evidence.prompt_delta) == (2, 0)
    assert evidence.num_edges == {"start": 2, "end": 2}
    assert evidence.num_spaced_edges == {"start": 1, "end": 0}
    cut = replace(subject, completion=replace(completion, finish_reason="length", content="cut here "))
    assert evidence_of(cut).num_edges == {"start": 2, "end": 1}
    assert "answers without tool calls" in evidence.kinds
    assert evidence.is_judged
