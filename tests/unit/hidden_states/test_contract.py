from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import GateError, RecipeError
from eagle3.hidden_states.contract import (
    CaptureContract,
    checked_layer_ids,
    contract_from_json,
    default_layer_ids,
    from_sglang_output_ids,
    to_sglang_output_ids,
)

CONTRACT = CaptureContract(
    target="tiny",
    layer_ids=(2, 15, 27),
    num_layers=30,
    hidden_size=576,
    dtype="bfloat16",
    tokenizer_sha256="a" * 64,
    weights_sha256="b" * 64,
    transformers_version="5.19.0",
)


def test_json_round_trip_is_canonical() -> None:
    text = CONTRACT.to_json()
    assert contract_from_json(text) == CONTRACT
    assert contract_from_json(text).to_json() == text


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "{}",
        CONTRACT.to_json().replace("pre_norm", "post_norm"),
        CONTRACT.to_json().replace("input_of_layer", "output_of_layer"),
        CONTRACT.to_json().replace('"schema_version":1', '"schema_version":2'),
    ],
)
def test_foreign_contracts_are_refused(text: str) -> None:
    with pytest.raises(GateError, match="capture contract"):
        contract_from_json(text)


def test_token_bytes_counts_all_slots_and_the_id() -> None:
    assert CONTRACT.num_slots == 4
    assert CONTRACT.token_bytes == 4 * 576 * 2 + 8
    assert replace(CONTRACT, dtype="float32").token_bytes == 4 * 576 * 4 + 8


def test_default_layers_of_real_depths() -> None:
    assert default_layer_ids(30) == (2, 15, 27)
    assert default_layer_ids(61) == (2, 30, 58)
    assert default_layer_ids(8) == (2, 4, 5)


@pytest.mark.parametrize("num_layers", [1, 2, 4, 5, 6])
def test_shallow_targets_have_no_default(num_layers: int) -> None:
    with pytest.raises(RecipeError, match=r"default layer ids .* not distinct"):
        default_layer_ids(num_layers)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], "is empty"),
        ([4, 2], "ascending order"),
        ([2, 2, 4], "distinct ids"),
        ([2, 8], r"names \[8\]"),
        ([-1, 4], r"names \[-1\]"),
    ],
)
def test_wrong_layer_ids_are_refused(ids: list[int], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        checked_layer_ids(ids, 8)


def test_given_ids_win_over_the_default() -> None:
    assert checked_layer_ids([0, 7], 8) == (0, 7)
    assert checked_layer_ids(None, 8) == (2, 4, 5)


@given(st.lists(st.integers(1, 200), min_size=1, unique=True).map(sorted))
def test_sglang_ids_are_one_less_and_come_back(ids: list[int]) -> None:
    converted = to_sglang_output_ids(ids)
    assert [after - before for before, after in zip(converted, ids, strict=True)] == [1] * len(ids)
    assert from_sglang_output_ids(converted) == tuple(ids)


def test_the_embedding_has_no_sglang_id() -> None:
    with pytest.raises(GateError, match="layer 0"):
        to_sglang_output_ids([0, 4])
