"""What the leader of an extraction does about a group, from what it sees."""

import pytest
from prefect.client.schemas.objects import StateType

from eagle3.file_system import SEEN_WITHIN_S
from flows.groups import PENDING_GRACE_S, RUNNING_GRACE_S, Verdict, judge


@pytest.mark.parametrize("state", list(StateType))
def test_a_group_that_is_held_is_never_taken_away(state: StateType) -> None:
    assert judge(state, is_held=True, idle_s=1e9) is Verdict.WAIT


@pytest.mark.parametrize(
    ("state", "idle_s", "expected"),
    [
        (StateType.SCHEDULED, 1e9, Verdict.WAIT),
        (StateType.PENDING, PENDING_GRACE_S, Verdict.WAIT),
        (StateType.PENDING, PENDING_GRACE_S + 1, Verdict.LOST),
        (StateType.RUNNING, RUNNING_GRACE_S, Verdict.WAIT),
        (StateType.RUNNING, RUNNING_GRACE_S + 1, Verdict.LOST),
        (StateType.COMPLETED, SEEN_WITHIN_S, Verdict.WAIT),
        (StateType.COMPLETED, SEEN_WITHIN_S + 1, Verdict.AGAIN),
        (StateType.CRASHED, 0, Verdict.AGAIN),
        (StateType.CANCELLED, 0, Verdict.AGAIN),
        (StateType.FAILED, 0, Verdict.FAILED),
    ],
)
def test_a_group_that_nobody_holds(state: StateType, idle_s: float, expected: Verdict) -> None:
    assert judge(state, is_held=False, idle_s=idle_s) is expected
