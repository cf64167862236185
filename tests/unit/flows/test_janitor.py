import pytest

from flows.attempt import AttemptRecord
from flows.janitor import is_worth_continuing


def attempts(*ended: bool, run_id: str | None = "this") -> list[AttemptRecord]:
    return [AttemptRecord(flow_run_id=run_id, has_ended=has_ended) for has_ended in ended]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([], False),  # it never began here
        (attempts(True, True), False),  # it always ended properly: what is crashed did not begin here
        (attempts(False), True),
        (attempts(True, False), True),
        (attempts(False, False), True),
        (attempts(False, False, False), False),  # it dies again and again
        (attempts(False, False, run_id="other") + attempts(False), True),
        (attempts(False, run_id=None), False),
    ],
)
def test_a_crashed_run_is_continued_a_few_times(made: list[AttemptRecord], expected: bool) -> None:
    assert is_worth_continuing(made, "this", max_attempts=3) is expected
