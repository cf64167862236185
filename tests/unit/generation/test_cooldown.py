"""Resting providers."""

from eagle3.generation.cooldown import FAILURES_IN_A_ROW, FIRST_REST_S, Cooldown

BOTH = ["A", "B"]


def broken(cooldown: Cooldown, name: str, at_s: float) -> None:
    for _ in range(FAILURES_IN_A_ROW):
        cooldown.failed(name, at_s)


def test_failures_in_a_row_rest_a_provider_and_single_ones_do_not():
    cooldown = Cooldown()
    for _ in range(10):
        cooldown.failed("A", 0.0)
        cooldown.succeeded("A")
    assert cooldown.resting(BOTH, 0.0) == []
    broken(cooldown, "A", 0.0)
    assert cooldown.resting(BOTH, 0.0) == ["A"]
    assert cooldown.resting(BOTH, FIRST_REST_S) == []


def test_one_failure_after_the_rest_doubles_it_and_a_success_forgets():
    cooldown = Cooldown()
    broken(cooldown, "A", 0.0)
    cooldown.failed("A", FIRST_REST_S)
    assert cooldown.resting(BOTH, 2.9 * FIRST_REST_S) == ["A"]
    assert cooldown.resting(BOTH, 3.1 * FIRST_REST_S) == []
    cooldown.succeeded("A")
    cooldown.failed("A", 4 * FIRST_REST_S)
    assert cooldown.resting(BOTH, 4 * FIRST_REST_S) == []


def test_the_last_one_never_rests():
    cooldown = Cooldown()
    broken(cooldown, "A", 0.0)
    broken(cooldown, "B", 1.0)
    assert cooldown.resting(BOTH, 2.0) == ["B"]
    assert cooldown.resting(["A"], 2.0) == []
