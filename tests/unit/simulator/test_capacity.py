"""What an endpoint takes: capacities that change in the course of time, and requests per second."""

import pytest
from pydantic import ValidationError

from eagle3.simulator.scenario import Provider
from tests.unit.simulator.conftest import provider

STEPS = [{"after_s": 100, "max_in_flight": 1}, {"after_s": 200, "max_in_flight": None}]


def num_accepted(sim, count: int) -> int:
    """Send requests that last 1000 s; return how many were not refused at once."""
    return sum(sim.chat(f"prompt {number}").reply is None for number in range(count))


def slow(**fields):
    return provider("Solo", latency={"median_s": 1000, "sigma": 0}, **fields)


def test_a_capacity_changes_at_its_times_counted_from_the_first_request(bench):
    sim = bench(providers=[provider("Solo", capacity=3, capacity_steps=STEPS)])
    sim.clock.advance(500)  # nobody has asked yet
    assert num_accepted(sim, 5) == 3
    sim.clock.advance(99)
    assert num_accepted(sim, 5) == 3
    sim.clock.advance(2)
    assert num_accepted(sim, 5) == 1
    sim.clock.advance(100)
    assert num_accepted(sim, 50) == 50


def test_what_is_in_flight_above_a_lower_capacity_is_finished(bench):
    sim = bench(providers=[slow(capacity=4, capacity_steps=[{"after_s": 10, "max_in_flight": 2}])])
    calls = [sim.chat(f"prompt {number}") for number in range(4)]
    sim.clock.advance(11)
    assert num_accepted(sim, 3) == 0
    sim.clock.advance(1000)
    assert [call.reply.status for call in calls] == [200] * 4
    assert num_accepted(sim, 3) == 2


def test_capacity_times_are_scaled(bench):
    sim = bench(time_scale=0.1, providers=[slow(capacity=2, capacity_steps=STEPS)])
    assert num_accepted(sim, 3) == 2
    sim.clock.advance(9.9)
    assert sim.chat().reply.status == 429
    sim.clock.advance(10.2)
    assert num_accepted(sim, 5) == 5


def test_a_rate_admits_a_burst_and_then_so_many_per_second(bench):
    sim = bench(providers=[slow(rate={"per_s": 2, "burst": 5})])
    assert num_accepted(sim, 20) == 5
    sim.clock.advance(1.0)
    assert num_accepted(sim, 20) == 2
    sim.clock.advance(0.25)
    assert num_accepted(sim, 1) == 0, "half a request's time has passed"
    sim.clock.advance(0.25)
    assert num_accepted(sim, 2) == 1, "and the refused one did not count"
    sim.clock.advance(60)
    assert num_accepted(sim, 20) == 5


def test_a_rate_is_scaled(bench):
    sim = bench(time_scale=0.1, providers=[slow(rate={"per_s": 2, "burst": 25})])
    assert num_accepted(sim, 40) == 25
    sim.clock.advance(1.0)
    assert num_accepted(sim, 40) == 20


def test_without_time_there_is_no_rate_and_everything_has_happened(bench):
    rate = {"per_s": 2, "burst": 1}
    sim = bench(time_scale=0, providers=[provider("Solo", capacity=1, capacity_steps=STEPS, rate=rate)])
    calls = [sim.chat(f"prompt {number}") for number in range(40)]
    assert {sim.finished(call).status for call in calls} == {200}


def test_what_one_endpoint_does_not_take_goes_to_the_next(bench):
    sim = bench(
        providers=[
            provider("One", rate={"per_s": 1, "burst": 1}),
            provider("Two", capacity=1, latency={"median_s": 5, "sigma": 0}),
        ]
    )
    calls = [sim.chat(f"prompt {number}", provider={"order": ["one"]}) for number in range(3)]
    assert calls[2].reply.status == 429
    assert calls[2].reply.json()["error"]["availability"]["affected_providers"] == ["One", "Two"]
    sim.clock.advance(60)
    assert [call.reply.json()["provider"] for call in calls[:2]] == ["One", "Two"]


def test_a_refusal_may_take_its_time(bench):
    sim = bench(providers=[slow(capacity=1, refusal_s=0.3)])
    sim.chat()
    refused = sim.chat("prompt 1")
    sim.clock.advance(0.2)
    assert refused.reply is None
    sim.clock.advance(0.2)
    assert refused.reply.status == 429
    assert sim.state.counters.in_flight == 1


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"capacity_steps": [{"after_s": 5, "max_in_flight": 1}, {"after_s": 5, "max_in_flight": 2}]},
            "rising order",
        ),
        ({"capacity_steps": [{"after_s": 0, "max_in_flight": 1}]}, "greater than 0"),
        ({"capacity_steps": [{"after_s": 1, "max_in_flight": 0}]}, "greater than or equal to 1"),
        ({"capacity_steps": [{"after_s": 1}]}, "Field required"),
        ({"rate": {"per_s": 0, "burst": 1}}, "greater than 0"),
        ({"rate": {"per_s": 1}}, "Field required"),
        ({"refusal_s": -1}, "greater than or equal to 0"),
    ],
)
def test_impossible_limits_are_refused(fields, complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        Provider.model_validate(provider("Solo", **fields))
