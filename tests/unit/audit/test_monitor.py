"""Looking while buying: a habit that begins stops the run within a few answers, drift and odd answers do not."""

from dataclasses import replace

import pytest

from eagle3.audit.monitor import MAX_FIT_ANSWERS, AuditMonitor
from eagle3.errors import AuditFailedError
from eagle3.recipe import Reconstruction
from eagle3.records import ToolCall
from tests.unit.conftest import TOOL


@pytest.fixture
def monitor(tiny_run) -> AuditMonitor:
    run = tiny_run.with_recipe(reconstruction=Reconstruction(min_profile_samples=5))
    return AuditMonitor(run.recipe, run.target)


def answers(run, first: int, count: int, **changes):
    pairs = []
    for number in range(first, first + count):
        prompt = run.prompt(f"question {number}", tools=[TOOL] if changes.get("calls") else ())
        pairs.append((prompt, run.completion(prompt, content=f"Answer {number}.", **changes)))
    return pairs


def test_clean_answers_pass(tiny_run, monitor):
    for start in range(0, 120, 20):
        monitor.look(answers(tiny_run, start, 20))
    assert monitor.num_seen == 120


@pytest.mark.parametrize("before", [20, 200])
def test_a_habit_that_begins_is_found_within_sixteen_answers(tiny_run, monitor, before):
    monitor.look(answers(tiny_run, 0, before))
    with pytest.raises(AuditFailedError, match=r"A06, Acme: \d+ of the newest 16 answers .*\+1 ids"):
        monitor.look(answers(tiny_run, before, 16, delta=1))


def test_scattered_drift_does_not_stop_the_run(tiny_run, monitor):
    pairs = answers(tiny_run, 0, 200)
    for number, delta in ((17, 1), (40, -1), (41, 2), (77, 1), (120, -2), (121, 1), (160, 1), (199, 1)):
        pairs[number] = answers(tiny_run, number, 1, delta=delta)[0]
    for start in range(0, 200, 10):
        monitor.look(pairs[start : start + 10])


def test_a_habit_of_tool_calls_alone_is_found_among_other_answers(tiny_run, monitor):
    call = ToolCall(id="look_up:0", name="look_up", arguments='{"a": 1}')
    monitor.look(answers(tiny_run, 0, 100))
    for start in range(100, 200, 20):
        monitor.look([*answers(tiny_run, start, 16), *tool_answers(tiny_run, start + 16, 4, call, delta=0)])
    wrong = [
        each
        for start in range(200, 240, 20)
        for each in [*answers(tiny_run, start, 16), *tool_answers(tiny_run, start + 16, 4, call, delta=3)]
    ]
    with pytest.raises(AuditFailedError, match=r"A06, Acme: 8 of the newest 16 answers ended by 'tool_calls' have"):
        monitor.look(wrong)


def tool_answers(run, first: int, count: int, call: ToolCall, delta: int):
    pairs = []
    for number in range(first, first + count):
        prompt = run.prompt(f"question {number}", tools=[TOOL])
        pairs.append((prompt, run.completion(prompt, content=None, calls=[call], delta=delta)))
    return pairs


def test_texts_that_begin_to_have_spaces(tiny_run, monitor):
    monitor.look(answers(tiny_run, 0, 40))
    spaced = [
        (prompt, replace(reply, reasoning=f" {reply.reasoning}", content=f" {reply.content}"))
        for prompt, reply in answers(tiny_run, 40, 20)
    ]
    with pytest.raises(AuditFailedError, match="A09, Acme: 100% of the newest texts of dataset 'one' start"):
        monitor.look(spaced)


def test_another_model_id_stops_at_once(tiny_run, monitor):
    monitor.look(answers(tiny_run, 0, 20))
    with pytest.raises(AuditFailedError, match="A19, the whole run: replies name 2 models"):
        monitor.look(answers(tiny_run, 20, 1, model="tiny/model-0902"))


def test_a_precision_that_routing_forbids(tiny_run, monitor):
    with pytest.raises(AuditFailedError, match=r"A19, Acme: .*'fp4'"):
        monitor.look(answers(tiny_run, 0, 1, quantization="fp4"))


def test_prompts_that_are_rendered_by_another_template(tiny_run, monitor):
    wrong = [
        (prompt, replace(reply, usage=reply.usage._replace(prompt_tokens=reply.usage.prompt_tokens + 7)))
        for prompt, reply in answers(tiny_run, 0, 16)
    ]
    with pytest.raises(AuditFailedError, match=r"A08, Acme: 16 of the newest 16 prompts .* -7"):
        monitor.look(wrong)


def test_what_probes_settled_is_not_learned_away(tiny_run, monitor):
    unbilled = answers(tiny_run, 0, 20, delta=1)
    monitor.look(unbilled)  # alone, it looks like a provider that does not bill the end
    fresh = AuditMonitor(tiny_run.recipe, tiny_run.target)
    fresh.settle({"Acme": {"end_billed": frozenset({True}), "close_billed": frozenset({True})}})
    with pytest.raises(AuditFailedError, match="A06, Acme"):
        fresh.look(unbilled)


def test_memory_of_a_long_run_is_bounded(tiny_run, monitor):
    pairs = answers(tiny_run, 0, 50)
    for _ in range(MAX_FIT_ANSWERS // 50 + 5):
        monitor.look(pairs)
    assert len(monitor._first["Acme", "tiny/model"]) == MAX_FIT_ANSWERS


def test_a_change_that_most_answers_follow_is_found_when_habits_are_learned_anew(tiny_run, monitor):
    """Of 64 answers 48 come after the change: the habit learned is the new one, and the newest answers all fit it."""
    pairs = [*answers(tiny_run, 0, 16), *answers(tiny_run, 16, 48, delta=1)]
    with pytest.raises(AuditFailedError, match="A06, Acme: 16 of the newest 16 answers"):
        monitor.look(pairs)
