"""Each gate lets the right store pass and stops its planted faults."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from eagle3.errors import GateError
from eagle3.hidden_states.contract import CaptureContract
from eagle3.hidden_states.gates import (
    GateSample,
    check_values,
    identity_gate,
    measure_lens,
    order_gate,
    run_gates,
    target_gate,
)
from eagle3.hidden_states.transformers_backend import TransformersBackend

Samples = list[GateSample]


@pytest.fixture
def contract(answering_target: Any) -> CaptureContract:
    return answering_target.contract


def changed(samples: Samples, change: Callable[[GateSample], Any]) -> Samples:
    return [replace(sample, hidden_TLH=change(sample)) for sample in samples]


def permuted(samples: Samples, order: Sequence[int]) -> Samples:
    return changed(samples, lambda sample: sample.hidden_TLH[:, list(order)])


def with_slot(sample: GateSample, slot: int, state: Any) -> Any:
    states = sample.hidden_TLH.clone()
    states[:, slot] = state
    return states


def test_right_states_pass_all_gates(samples: Samples, contract: CaptureContract, backend: TransformersBackend) -> None:
    figures = run_gates(samples, contract, backend, 0.9)
    agreement = figures["agreement_by_slot"]
    assert agreement == sorted(agreement)
    assert agreement[-1] == 1.0
    assert figures["positions"] == sum(sum(sample.loss_mask) for sample in samples)
    assert max(figures["identity_distance_by_slot"]) < 1e-4


def test_state_after_the_final_norm(samples: Samples, contract: CaptureContract, backend: TransformersBackend) -> None:
    post = changed(samples, lambda sample: with_slot(sample, -1, backend.final_norm(sample.hidden_TLH[:, -1])))
    with pytest.raises(GateError, match="target gate"):
        run_gates(post, contract, backend, 0.9)
    with pytest.raises(GateError, match=r"identity gate: slot 3 .* pre-norm"):
        identity_gate(post, contract, backend)


def test_scale_of_the_last_state_is_free(
    samples: Samples, contract: CaptureContract, backend: TransformersBackend
) -> None:
    unit = changed(samples, lambda sample: with_slot(sample, -1, sample.hidden_TLH[:, -1] * 7))
    run_gates(unit, contract, backend, 0.9)


@pytest.mark.parametrize(("shift", "side"), [(1, "late"), (-1, "early")])
def test_states_shifted_by_one_token(
    samples: Samples, contract: CaptureContract, backend: TransformersBackend, shift: int, side: str
) -> None:
    shifted = changed(samples, lambda sample: sample.hidden_TLH.roll(shift, dims=0))
    with pytest.raises(GateError, match=rf"target gate.* one token too {side}"):
        run_gates(shifted, contract, backend, 0.6)
    with pytest.raises(GateError, match="identity gate"):
        identity_gate(shifted, contract, backend)


def test_shift_is_found_even_when_the_floor_is_zero(samples: Samples, backend: TransformersBackend) -> None:
    shifted = changed(samples, lambda sample: sample.hidden_TLH.roll(1, dims=0))
    with pytest.raises(GateError, match="target gate"):
        target_gate(measure_lens(shifted, backend), 0.0)


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 1, 3, 2), (3, 0, 1, 2)])
def test_last_slot_permuted(
    samples: Samples, contract: CaptureContract, backend: TransformersBackend, order: tuple[int, ...]
) -> None:
    with pytest.raises(GateError, match=r"target gate.* slots are permuted"):
        run_gates(permuted(samples, order), contract, backend, 0.6)


def test_low_and_high_slot_swapped(samples: Samples, contract: CaptureContract, backend: TransformersBackend) -> None:
    swapped = permuted(samples, (2, 1, 0, 3))
    target_gate(measure_lens(swapped, backend), 0.9)
    with pytest.raises(GateError, match=r"order gate: slot"):
        run_gates(swapped, contract, backend, 0.6)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 2, 1, 3)])
def test_neighbouring_slots_swapped(
    samples: Samples, contract: CaptureContract, backend: TransformersBackend, order: tuple[int, ...]
) -> None:
    with pytest.raises(GateError, match="identity gate"):
        identity_gate(permuted(samples, order), contract, backend)


@pytest.mark.parametrize("layer_ids", [(1, 3, 4), (3, 5, 6), (2, 4, 6)])
def test_layer_ids_off_by_one(
    answering_target: Any, contract: CaptureContract, backend: TransformersBackend, layer_ids: tuple[int, ...]
) -> None:
    rows = answering_target.rows
    wrong = TransformersBackend(answering_target.directory, layer_ids, "float32")
    states = wrong.capture([row.input_ids for row in rows])
    off = [
        GateSample(row=index, input_ids=row.input_ids, loss_mask=row.loss_mask, hidden_TLH=state)
        for index, (row, state) in enumerate(zip(rows, states, strict=True))
    ]
    report = measure_lens(off, backend)
    target_gate(report, 0.9)
    order_gate(report)
    with pytest.raises(GateError, match=r"identity gate: slot \d should hold the input of layer"):
        run_gates(off, contract, backend, 0.9)


def test_weights_of_another_model(
    answering_target: Any, contract: CaptureContract, other_target: Any, samples: Samples
) -> None:
    other = TransformersBackend(other_target, contract.layer_ids, "float32")
    states = other.capture([sample.input_ids for sample in samples])
    foreign = [replace(sample, hidden_TLH=state) for sample, state in zip(samples, states, strict=True)]
    with pytest.raises(GateError, match=r"target gate.* weights or tokenizer"):
        run_gates(foreign, contract, other, 0.6)


def test_states_of_other_weights_than_the_target_at_hand(
    contract: CaptureContract, other_target: Any, samples: Samples
) -> None:
    other = TransformersBackend(other_target, contract.layer_ids, "float32")
    with pytest.raises(GateError, match="identity gate"):
        identity_gate(samples, contract, other)


@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "all zero")]
)
def test_impossible_values(
    samples: Samples, contract: CaptureContract, backend: TransformersBackend, value: float, what: str
) -> None:
    states = samples[3].hidden_TLH.clone()
    states[5, 2] = value
    with pytest.raises(GateError, match=rf"row 3 are {what} at token 5, slot 2 \(1 of"):
        check_values(3, states)
    broken = [*samples[:3], replace(samples[3], hidden_TLH=states), *samples[4:]]
    with pytest.raises(GateError, match="value gate"):
        run_gates(broken, contract, backend, 0.6)


def test_one_bad_number_in_a_good_state_is_found(samples: Samples) -> None:
    states = samples[0].hidden_TLH.clone()
    states[0, 0, 0] = float("-inf")
    with pytest.raises(GateError, match="not finite at token 0, slot 0"):
        check_values(0, states)


def test_no_response_position(samples: Samples, contract: CaptureContract, backend: TransformersBackend) -> None:
    masked = [replace(sample, loss_mask=[False] * len(sample.input_ids)) for sample in samples]
    with pytest.raises(GateError, match="response position"):
        run_gates(masked, contract, backend, 0.6)
