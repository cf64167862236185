"""What training and export must know about the target, and the check that the hidden states are of that target."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import GateError, TargetError

FINAL_NORM = "model.norm.weight"
"""Name of the final norm's factor, perhaps with something before it. Source: `load_model_layers` of speculators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """Figures of a target's config.json."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    end_ids: tuple[int, ...]
    """Ids that end an answer."""
    bos_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The part of the hidden states' contract that a draft depends on."""

    layer_ids: tuple[int, ...]
    """Captured layers, input-of-layer convention, ascending."""
    dtype: str


def read_target_facts(target: Path) -> TargetFacts:
    """Read config.json of a target directory; of a multimodal one, its text part.

    Raises:
        TargetError: The file is missing, or lacks a figure.
    """
    path = target / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text("utf-8"))
        text: dict[str, Any] = config.get("text_config", config)
        end = text.get("eos_token_id", config.get("eos_token_id"))
        return TargetFacts(
            architecture=str((config.get("architectures") or text.get("architectures") or [""])[0]),
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
            end_ids=() if end is None else tuple(end) if isinstance(end, list) else (int(end),),
            bos_id=text.get("bos_token_id"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise TargetError(
            f"config.json of target {target.name!r} cannot be used ({type(exc).__name__}: {exc}): expected layers, "
            "hidden size and vocabulary size of a causal language model. Check the directory."
        ) from exc


def check_final_norm(target: Path) -> None:
    """Check that the trainer will find the target's final norm, from which it rebuilds the training targets.

    Without this name the trainer takes the shortest one that ends in `norm.weight`, which is a norm inside a layer, and
    says nothing.

    Raises:
        GateError: No tensor of the target has the name of a final norm.
        TargetError: The weight files cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    index = target / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = list(json.loads(index.read_text("utf-8"))["weight_map"])
        else:
            with safe_open(target / "model.safetensors", framework="numpy") as weights:
                names = list(weights.keys())
    except (OSError, ValueError, KeyError, SafetensorError) as exc:
        raise TargetError(
            f"weights of target {target.name!r} cannot be read ({type(exc).__name__}: {exc}): expected "
            "model.safetensors or its index. Check the directory."
        ) from exc
    if not any(name == FINAL_NORM or name.endswith(f".{FINAL_NORM}") for name in names):
        found = [name for name in names if name.endswith("norm.weight") and "layers." not in name]
        raise GateError(
            f"target {target.name!r} has no tensor named {FINAL_NORM!r}, found {found[:5]}: the trainer would use "
            "another norm for its targets. This architecture is not supported."
        )


def check_capture(
    contract: Mapping[str, Any], facts: TargetFacts, layer_ids: tuple[int, ...] | None, tokenizer_digest: str
) -> Capture:
    """Check that hidden states with this contract belong to this target and mean what training takes them for.

    Args:
        contract: As sealed with the hidden states.
        facts: Of the target the draft is trained for.
        layer_ids: As the recipe asks for; None accepts the default layers.
        tokenizer_digest: Of the tokenizer that made the corpus.

    Raises:
        GateError: A field differs; the message names all that do.
    """
    wanted_ids = list(layer_ids or (2, facts.num_layers // 2, facts.num_layers - 3))
    expected: dict[str, Any] = {
        "layer_ids": wanted_ids,
        "num_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "layer_convention": "input_of_layer",
        "order": "ascending",
        "final_slot": "pre_norm",
        "tokenizer_sha256": tokenizer_digest,
    }
    found = {
        name: list(value) if isinstance(value := contract.get(name), (list, tuple)) else value for name in expected
    }
    wrong = [
        f"{name} is {found[name]!r}, expected {value!r}" for name, value in expected.items() if found[name] != value
    ]
    if wrong:
        raise GateError(
            f"the hidden states do not fit the target: {'; '.join(wrong)}. A draft trained on them would accept "
            "nothing in an engine. Run 'eagle3 extract' again for this recipe."
        )
    return Capture(layer_ids=tuple(int(layer) for layer in wanted_ids), dtype=str(contract.get("dtype", "")))
