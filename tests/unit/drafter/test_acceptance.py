import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.drafter.acceptance import Acceptance, no_rounds, play_rounds
from eagle3.drafter.dataset import CorpusRow
from eagle3.drafter.evaluation import check_report, held_out_prompts, layer_order_verdict
from eagle3.errors import EvaluationError

PROMPT = [1, 2]
ANSWER = [10, 11, 12, 13, 14, 15, 16, 17]
IDS = PROMPT + ANSWER


def chains_of(drafts: dict[int, list[int]]) -> list[list[int]]:
    """Chains that accept nothing, but for the given rows."""
    return [drafts.get(row, [0, 0, 0]) for row in range(len(IDS) - 1)]


def test_a_perfect_draft_accepts_all_of_every_chain():
    chains = [(IDS + [0] * 9)[row + 2 : row + 5] for row in range(len(IDS) - 1)]
    outcome = play_rounds(chains, IDS, len(PROMPT))
    # The target gives 10, the draft 11-13, the target 14, the draft 15-17.
    assert outcome.num_rounds == 2
    assert outcome.accepted_by_position == (2, 2, 2)
    assert outcome.acceptance_length == 4.0


def test_a_draft_without_merit_costs_one_round_per_token():
    outcome = play_rounds(chains_of({}), IDS, len(PROMPT))
    assert outcome.num_rounds == len(ANSWER) - 3
    assert outcome.acceptance_length == 1.0


def test_a_chain_counts_up_to_its_first_wrong_token():
    outcome = play_rounds(chains_of({1: [11, 99, 13]}), IDS, len(PROMPT))
    assert outcome.accepted_by_position == (1, 0, 0)
    assert outcome.num_rounds == 4  # rounds begin at 10, 12, 13, 14


def test_short_continuations_have_no_rounds():
    outcome = play_rounds(chains_of({}), [*PROMPT, 10, 11, 12], len(PROMPT))
    assert outcome == no_rounds(3)
    assert (outcome.acceptance_length, outcome.standard_error, outcome.rate_by_position) == (1.0, 0.0, (0.0, 0.0, 0.0))


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=30, max_size=30), st.integers(1, 8))
def test_rounds_tile_the_continuation(chains, num_prompt_tokens):
    ids = [1] * 31
    outcome = play_rounds(chains, ids, num_prompt_tokens)
    covered = outcome.num_rounds + sum(outcome.accepted_by_position)
    remaining = len(ids) - num_prompt_tokens - covered
    assert 0 <= remaining <= 3
    assert list(outcome.accepted_by_position) == sorted(outcome.accepted_by_position, reverse=True)


def test_the_standard_error_is_that_of_the_mean():
    # Rounds accepted 0, 1, 3.
    outcome = Acceptance(num_rounds=3, accepted_by_position=(2, 1, 1), sum_of_squares=10)
    variance = ((0 - 4 / 3) ** 2 + (1 - 4 / 3) ** 2 + (3 - 4 / 3) ** 2) / 2
    assert outcome.standard_error == pytest.approx(math.sqrt(variance / 3))


def rounds_with(mean_accepted: float, num_rounds: int = 1000) -> Acceptance:
    hits = round(mean_accepted * num_rounds)
    return Acceptance(num_rounds=num_rounds, accepted_by_position=(hits, 0, 0), sum_of_squares=hits)


@pytest.mark.parametrize(
    ("in_order", "moved", "verdict"),
    [(0.5, 0.2, "clear"), (0.5, 0.3, "weak"), (0.3, 0.31, "weak"), (0.2, 0.5, "wrong")],
)
def test_the_layer_order_is_judged_against_orders_that_move_the_last_layer(in_order, moved, verdict):
    found = layer_order_verdict(rounds_with(in_order), {(2, 1, 0): rounds_with(moved), (2, 0, 1): rounds_with(0.01)})
    assert found["verdict"] == verdict
    assert found["best_other_order"] == [2, 1, 0]


def report(length: float, order: dict[str, object]) -> dict[str, object]:
    return {
        "acceptance_length_trained": length,
        "acceptance_length_untrained": 1.0,
        "standard_error": 0.01,
        "rounds": 100,
        "layer_order": order,
    }


def test_a_report_of_an_idle_draft_is_refused():
    with pytest.raises(EvaluationError, match=r"acceptance length is 1\.020 .* expected more than 1\.02"):
        check_report(report(1.02, {"verdict": "weak"}), 1.02)
    check_report(report(1.021, {"verdict": "weak"}), 1.02)


def test_a_report_of_shuffled_layers_is_refused():
    order = {"verdict": "wrong", "best_other_order": [2, 0, 1], "mean_accepted_best_other": 0.5, "mean_accepted": 0.2}
    with pytest.raises(EvaluationError, match=r"in order \[2, 0, 1\]"):
        check_report(report(1.2, order), 1.02)


def validation_row(sample_id: str, input_ids: list[int], *, split: str = "validation") -> CorpusRow:
    return CorpusRow(
        sample_id=sample_id,
        dataset="a",
        split=split,
        input_ids=input_ids,
        loss_mask=[False, False, *[True] * (len(input_ids) - 2)],
        num_prompt_tokens=2,
    )


def test_several_answers_to_one_prompt_are_measured_once():
    rows = [
        validation_row("train", [9, 9, 1], split="train"),
        validation_row("first", [1, 2, 3]),
        validation_row("replica", [1, 2, 4, 5]),
        validation_row("other", [1, 3, 3]),
        validation_row("third", [1, 4, 3]),
    ]
    assert [row.sample_id for row in held_out_prompts(rows, 2)] == ["first", "other"]
