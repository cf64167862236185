"""One body over every extraction backend and several architectures: what the capture contract promises, it keeps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import TargetError
from eagle3.hidden_states.backend import Backend
from eagle3.hidden_states.transformers_backend import TransformersBackend

BACKENDS: dict[str, Callable[..., Backend]] = {"transformers": TransformersBackend}
ARCHITECTURES = ("Llama", "Qwen3", "Mistral")
NUM_LAYERS = 8
VOCAB = 97
LAYER_IDS = (0, 3, 7)
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-2}
"""Relative error per state; a batch of another shape rounds in another order."""
SEQUENCES = [[5, 3, 8, 13, 21], [1], [(7 * k) % VOCAB for k in range(40)], [(11 * k + 2) % VOCAB for k in range(23)]]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    import transformers

    config = getattr(transformers, f"{request.param}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{request.param}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.uniform_(0.2, 2.0) if "norm" in name else weight.normal_(0, 0.15)
    place = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(place)
    return place


@pytest.fixture(params=sorted(BACKENDS))
def open_backend(request: pytest.FixtureRequest, directory: Path) -> Callable[..., Backend]:
    def open_with(dtype: str, layer_ids: Sequence[int] = LAYER_IDS) -> Backend:
        return BACKENDS[request.param](directory, layer_ids, dtype)

    return open_with


def relative_error(found: Any, expected: Any) -> float:
    expected = expected.float()
    return float(((found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def test_slots_are_layer_inputs_and_the_pre_norm_output(open_backend: Callable[..., Backend]) -> None:
    backend = open_backend("float32")
    assert (backend.num_layers, backend.hidden_size) == (NUM_LAYERS, 32)
    ids = SEQUENCES[2]
    (states,) = backend.capture([ids])
    reference = backend.reference_states(ids)
    assert tuple(states.shape) == (len(ids), len(LAYER_IDS) + 1, 32)
    assert tuple(reference.shape) == (NUM_LAYERS + 1, len(ids), 32)
    for slot, layer in enumerate(LAYER_IDS):
        assert relative_error(states[:, slot], reference[layer]) < TOLERANCE["float32"]
    last = states[:, -1]
    assert relative_error(backend.final_norm(last), reference[NUM_LAYERS]) < TOLERANCE["float32"]
    assert relative_error(last, reference[NUM_LAYERS]) > 0.1


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_padding_changes_nothing(open_backend: Callable[..., Backend], dtype: str) -> None:
    backend = open_backend(dtype)
    together = backend.capture(SEQUENCES)
    for ids, state in zip(SEQUENCES, together, strict=True):
        (alone,) = backend.capture([ids])
        assert state.shape == alone.shape
        assert str(state.dtype) == f"torch.{dtype}"
        assert relative_error(state, alone) < TOLERANCE[dtype]


def test_without_bfloat16_arithmetic_only_the_result_is_rounded(
    open_backend: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("eagle3.precision.has_fast_bfloat16", lambda: False)
    ids = SEQUENCES[2]
    narrow, wide = open_backend("bfloat16"), open_backend("float32")
    assert narrow.compute_dtype == "float32"
    (states,), (expected,) = narrow.capture([ids]), wide.capture([ids])
    assert states.dtype == torch.bfloat16
    # Half a unit in the last of 8 binary places is the most that one rounding can be off.
    assert relative_error(states, expected) < 2**-8
    assert narrow.predict(states[:, -1]).tolist() == wide.predict(states[:, -1].float()).tolist()
    assert relative_error(narrow.final_norm(states[:, -1]), wide.final_norm(expected[:, -1])) < 2**-7


def test_where_bfloat16_is_fast_it_is_computed_in(
    open_backend: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.precision.has_fast_bfloat16", lambda: True)
    assert open_backend("bfloat16").compute_dtype == "bfloat16"


def test_a_state_depends_only_on_what_came_before(open_backend: Callable[..., Backend]) -> None:
    backend = open_backend("float32")
    ids = SEQUENCES[3]
    (whole,), (start,) = backend.capture([ids]), backend.capture([ids[:9]])
    assert relative_error(whole[:9], start) < TOLERANCE["float32"]


def test_predictions_are_those_of_the_whole_model(open_backend: Callable[..., Backend], directory: Path) -> None:
    import torch
    import transformers

    backend = open_backend("float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = SEQUENCES[2]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1)
    (states,) = backend.capture([ids])
    assert backend.predict(states[:, -1]).tolist() == expected.tolist()


def test_no_hook_stays_behind(open_backend: Callable[..., Backend]) -> None:
    backend = open_backend("float32")
    (first,) = backend.capture([SEQUENCES[0]])
    backend.capture([SEQUENCES[2]])
    with pytest.raises(IndexError):
        backend.capture([[VOCAB + 5]])
    (again,) = backend.capture([SEQUENCES[0]])
    assert bool((first == again).all())


def test_unreadable_target_is_told(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="cannot be loaded"):
        TransformersBackend(tmp_path, LAYER_IDS, "float32")
