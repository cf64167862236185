"""The capture contract: what the stored hidden states are, written down once and carried by every file.

Four silent faults ruin a draft without any error: wrong layer order, layer ids off by one, a last state taken after the
final norm, and a shift by one token. The contract names the convention for each; `eagle3.hidden_states.gates` checks
that the states keep it. No tensors here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from pydantic import TypeAdapter, ValidationError

from eagle3.errors import GateError, RecipeError
from eagle3.records import canonical_json

DtypeName = Literal["bfloat16", "float32"]

ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4}
"""Bytes of one stored value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureContract:
    """What one tensor `hidden_states` of shape [T, L+1, H] holds."""

    target: str
    """Name of the target in the recipe; for people."""
    layer_ids: tuple[int, ...]
    """Slot l holds the input of decoder layer `layer_ids[l]`, after the residual add and before that layer's own norm;
    the same state that Hugging Face calls `hidden_states[layer_ids[l]]`."""
    num_layers: int
    """Decoder layers of the target."""
    hidden_size: int
    dtype: DtypeName
    """Of the forward pass and of the stored values."""
    tokenizer_sha256: str
    weights_sha256: str
    """Over the target's configuration and weight files."""
    transformers_version: str
    layer_convention: Literal["input_of_layer"] = "input_of_layer"
    order: Literal["ascending"] = "ascending"
    """Slots are in ascending layer order."""
    final_slot: Literal["pre_norm"] = "pre_norm"
    """The last slot is the output of the last layer before the final norm; its reader applies that norm once."""
    schema_version: Literal[1] = 1

    @property
    def num_slots(self) -> int:
        """Number of stored states per token, L + 1."""
        return len(self.layer_ids) + 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on disk: L + 1 states and one int64 id."""
        return self.num_slots * self.hidden_size * ITEM_BYTES[self.dtype] + 8

    def to_json(self) -> str:
        """Return canonical JSON: equal contracts give equal text."""
        return canonical_json(asdict(self))


_CONTRACT = TypeAdapter(CaptureContract)


def contract_from_json(text: str) -> CaptureContract:
    """Read a contract back.

    Raises:
        GateError: The text is no contract of this version.
    """
    try:
        values = cast("dict[str, Any]", json.loads(text))
        values["layer_ids"] = tuple(values["layer_ids"])
        return _CONTRACT.validate_python(values)
    except (ValueError, KeyError, TypeError, ValidationError) as exc:
        shown = text[:80]
        raise GateError(
            f"capture contract {shown!r} cannot be read ({type(exc).__name__}): another program or version wrote "
            "it. Delete the hidden states and run 'eagle3 extract' again."
        ) from exc


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Return [2, n // 2, n - 3], the layers that EAGLE-3 engines capture when told nothing.

    Raises:
        RecipeError: The model is too shallow, so that these ids would collide or swap.

    Source: `layers_to_capture` of SGLang and `eagle_aux_hidden_state_layer_ids` of speculators and vLLM.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if list(ids) != sorted(set(ids)):
        raise RecipeError(
            f"the target has {num_layers} layers; the default layer ids [2, n // 2, n - 3] would be {list(ids)}, "
            "which are not distinct and ascending. Set hidden_states.layer_ids in the recipe."
        )
    return ids


def checked_layer_ids(layer_ids: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layer ids to capture: those given, checked, or the default.

    Args:
        layer_ids: Input-of-layer ids, or None for `default_layer_ids`.
        num_layers: Decoder layers of the target, n.

    Raises:
        RecipeError: The ids are empty, not strictly ascending, or outside [0, n).
    """
    if layer_ids is None:
        return default_layer_ids(num_layers)
    ids = tuple(layer_ids)
    if not ids:
        raise RecipeError("hidden_states.layer_ids is empty; name at least one layer, or leave it out for the default")
    if list(ids) != sorted(set(ids)):
        raise RecipeError(
            f"hidden_states.layer_ids is {list(ids)}; expected distinct ids in ascending order, because engines "
            f"concatenate the states in layer order whatever the list says. Write {sorted(set(ids))}."
        )
    outside = [layer for layer in ids if not 0 <= layer < num_layers]
    if outside:
        raise RecipeError(
            f"hidden_states.layer_ids names {outside[:5]}; the target has {num_layers} layers, so input-of-layer ids "
            f"go from 0 to {num_layers - 1}. The state after the last layer is always stored and needs no id."
        )
    return ids


def to_sglang_output_ids(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the same layers as an explicit SGLang list, which names a layer by its output.

    Raises:
        GateError: Id 0, the embedding, is not the output of any layer.

    Source: `set_eagle3_layers_to_capture` of SGLang's Llama and Qwen targets adds 1 to each explicit id.
    """
    if any(layer < 1 for layer in layer_ids):
        raise GateError(
            f"layer ids {list(layer_ids)} hold the input of layer 0, which is the output of no layer: SGLang cannot "
            "capture it. Extract with ids of 1 and more."
        )
    return tuple(layer - 1 for layer in layer_ids)


def from_sglang_output_ids(layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Return input-of-layer ids of an explicit SGLang list; the inverse of `to_sglang_output_ids`."""
    return tuple(layer + 1 for layer in layer_ids)
