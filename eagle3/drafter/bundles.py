"""What each engine wants to find in a draft's folder: pure functions from the checkpoint to names, shapes and config.

Engines drop unknown tensors and leave missing ones random without a word, so a bundle's name set is checked in full.
Sources: `LlamaForCausalLMEagle3` of SGLang 0.5.23 and earlier, the speculators format as vLLM reads it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3.errors import ExportError

TRAINED_PREFIX = "layers.0."
SGLANG_PREFIX = "midlayer."
"""The one name of the decoder layer that all SGLang releases and vLLM load; older SGLang leaves `layers.0.` random."""

SHIFTING_HEURISTIC_ARCHITECTURES = frozenset(
    {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK2ForCausalLM", "KimiK25ForConditionalGeneration"}
)
"""Targets for which SGLang takes an explicit list as output-of-layer ids only when its first id is 1."""


def expected_tensors(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return name and shape of every tensor of a checkpoint, from the trainer's config.

    Args:
        config: Of the trainer: nested `transformer_layer_config`.
    """
    layer: Mapping[str, Any] = config["transformer_layer_config"]
    hidden, inner = int(layer["hidden_size"]), int(layer["intermediate_size"])
    heads = int(layer["num_attention_heads"])
    key_heads = int(layer.get("num_key_value_heads") or heads)
    size = int(layer.get("head_dim") or hidden // heads)
    num_captured = len(config["eagle_aux_hidden_state_layer_ids"])
    vocabulary, drafted = int(layer["vocab_size"]), int(config["draft_vocab_size"])
    shapes: dict[str, list[int]] = {
        "embed_tokens.weight": [vocabulary, hidden],
        "fc.weight": [hidden, num_captured * hidden],
        "layers.0.hidden_norm.weight": [hidden],
        "layers.0.input_layernorm.weight": [hidden],
        "layers.0.post_attention_layernorm.weight": [hidden],
        "layers.0.self_attn.q_proj.weight": [heads * size, 2 * hidden],
        "layers.0.self_attn.k_proj.weight": [key_heads * size, 2 * hidden],
        "layers.0.self_attn.v_proj.weight": [key_heads * size, 2 * hidden],
        "layers.0.self_attn.o_proj.weight": [hidden, heads * size],
        "layers.0.mlp.gate_proj.weight": [inner, hidden],
        "layers.0.mlp.up_proj.weight": [inner, hidden],
        "layers.0.mlp.down_proj.weight": [hidden, inner],
        "norm.weight": [hidden],
        "lm_head.weight": [drafted, hidden],
    }
    if drafted != vocabulary:
        shapes |= {"d2t": [drafted], "t2d": [vocabulary]}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = [num_captured * hidden]
    return shapes


def refuse_unservable(config: Mapping[str, Any], engine: str) -> None:
    """Refuse a checkpoint that the engine would load without an error and run wrongly.

    Raises:
        ExportError: The message names every trait in the way.
    """
    layer: Mapping[str, Any] = config["transformer_layer_config"]
    layer_types: Sequence[str] = layer.get("layer_types") or ()
    problems: list[str] = []
    if config.get("norm_before_residual"):
        problems.append("norm_before_residual is true, which SGLang does not have")
    if layer.get("model_type") != "llama":
        problems.append(f"its layer is a {layer.get('model_type')!r} layer, expected 'llama'")
    if int(layer.get("num_hidden_layers", 0)) != 1:
        problems.append(f"it has {layer.get('num_hidden_layers')} layers, expected 1")
    if "sliding_attention" in layer_types:
        problems.append("its attention has a sliding window, expected full attention")
    if config.get("embed_requires_grad"):
        problems.append("its embedding was trained, and engines use the target's")
    if problems:
        raise ExportError(f"the draft cannot be exported for {engine}: {'; '.join(problems)}. Train it again.")


def sglang_name(name: str) -> str:
    """Return the name under which the `sglang` bundle holds a tensor of the checkpoint."""
    return SGLANG_PREFIX + name.removeprefix(TRAINED_PREFIX) if name.startswith(TRAINED_PREFIX) else name


def sglang_layer_ids(layer_ids: Sequence[int], target_architecture: str) -> list[int]:
    """Return the captured layers as an explicit SGLang list, which names a layer by its output.

    Raises:
        ExportError: The list would mean other layers for this target.
    """
    shifted = [layer - 1 for layer in layer_ids]
    if shifted[0] < 0:
        raise ExportError(f"layer ids {list(layer_ids)} name the input of layer 0, which SGLang cannot capture")
    if target_architecture in SHIFTING_HEURISTIC_ARCHITECTURES and shifted[0] != 1:
        raise ExportError(
            f"layer ids {list(layer_ids)} would be written as {shifted}; for {target_architecture} SGLang takes a list "
            "as shifted only when it begins with 1, so it would capture other layers. Extract ids that begin with 2."
        )
    return shifted


def sglang_config(config: Mapping[str, Any], target_architecture: str, ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat config.json that SGLang reads.

    Args:
        config: Of the trainer.
        target_architecture: First entry of the target's `architectures`.
        ids: `bos_token_id` and `eos_token_id` of the target.
    """
    layer: Mapping[str, Any] = config["transformer_layer_config"]
    rope: dict[str, Any] = dict(layer.get("rope_parameters") or {})
    theta = rope.get("rope_theta", layer.get("rope_theta", 10000.0))
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    heads, hidden = int(layer["num_attention_heads"]), int(layer["hidden_size"])
    plain = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "hidden_act",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
    )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: layer[name] for name in plain},
        "num_hidden_layers": 1,
        "num_key_value_heads": int(layer.get("num_key_value_heads") or heads),
        "head_dim": int(layer.get("head_dim") or hidden // heads),
        "attention_bias": False,
        "mlp_bias": False,
        "draft_vocab_size": int(config["draft_vocab_size"]),
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta},
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        **ids,
        "norm_before_fc": bool(config.get("norm_before_fc")),
        "norm_output": bool(config.get("norm_output")),
        "fc_norm": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": sglang_layer_ids(
                config["eagle_aux_hidden_state_layer_ids"], target_architecture
            ),
            "norm_before_fc": bool(config.get("norm_before_fc")),
        },
    }
