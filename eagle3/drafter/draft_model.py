"""The draft model as an engine runs it: plain tensors in, drafted ids out.

This is our own forward pass, written from the layout of the checkpoint and not from the trainer's modules, so that
agreement with the trainer (a contract test) says something about both. It loads the trainer's checkpoint and the
exported bundles alike; export uses it to show that a bundle still computes the same.

Shapes: T positions, H hidden, K = L*H the captured layers side by side in ascending order, D draft vocabulary, N heads,
M key heads, A head size, S chained steps.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.drafter.extra import import_torch
from eagle3.errors import EvaluationError

LAYER_PREFIXES = ("layers.0.", "midlayer.")
"""Names of the one decoder layer: as trained, and as every SGLang release reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """What of a draft's config.json its forward pass needs."""

    hidden_size: int
    num_heads: int
    num_key_heads: int
    head_size: int
    norm_eps: float
    norm_before_fc: bool
    norm_output: bool
    layer: Mapping[str, Any]
    """Fields of a transformers LlamaConfig, for the rotary embedding."""


class DraftModel:
    """A one-layer EAGLE-3 draft."""

    def __init__(self, shape: DraftShape, tensors: Mapping[str, Any]) -> None:
        """Take float32 copies of the weights; `tensors` may use either name of the decoder layer."""
        torch = import_torch()
        transformers = __import__("transformers.models.llama.modeling_llama", fromlist=["LlamaRotaryEmbedding"])
        self.shape = shape
        self.weights: dict[str, Any] = {}
        for name, tensor in tensors.items():
            plain = name
            for prefix in LAYER_PREFIXES:
                plain = plain.removeprefix(prefix)
            self.weights[plain] = tensor.float() if tensor.is_floating_point() else tensor
        config = transformers.LlamaConfig(**dict(shape.layer))
        self._rotary = transformers.LlamaRotaryEmbedding(config)
        num_draft_ids = self.weights["lm_head.weight"].shape[0]
        offsets_D = self.weights.get("d2t", torch.zeros(num_draft_ids, dtype=torch.long))
        self.target_ids_D = torch.arange(num_draft_ids) + offsets_D
        """Target id of each draft id."""

    @property
    def num_parameters(self) -> int:
        """Trained parameters: all but embedding, head and id maps, which come from the target."""
        shared = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
        return sum(int(tensor.numel()) for name, tensor in self.weights.items() if name not in shared)

    def fuse(self, features_TK: Any) -> Any:
        """Project the captured layers [T, K] to the draft's width [T, H]."""
        if self.shape.norm_before_fc:
            features_TK = self._norm(features_TK, "input_norm")
        return features_TK @ self.weights["fc.weight"].T

    def draft_everywhere(self, input_ids_T: Any, features_TK: Any, num_steps: int) -> Any:
        """Draft a chain from every position at once.

        Position j holds token j+1 beside the target's feature of token j, as an engine has them at the start of a
        round. The chain from j sees the real entries up to j and its own drafted ones, never those of another chain;
        so every row equals what incremental drafting from that position gives.

        Args:
            input_ids_T: Target ids of one sequence, int64.
            features_TK: Captured layers of the same sequence.
            num_steps: Tokens per chain, S.

        Returns:
            int64 [T-1, S]: row j drafts tokens j+2 .. j+1+S.
        """
        chains, _ = self.trace(input_ids_T, features_TK, num_steps)
        return chains

    def trace(self, input_ids_T: Any, features_TK: Any, num_steps: int, teacher_ids_T: Any = None) -> tuple[Any, Any]:
        """Return the drafted ids [T-1, S] and the logits [S, T-1, D] behind them.

        With `teacher_ids_T` the chains are fed the true tokens instead of their own, which is what training does.
        """
        torch = import_torch()
        tokens_T = input_ids_T[1:]
        hidden_TH = self.fuse(features_TK[:-1].float())
        positions_T = torch.arange(1, len(tokens_T) + 1)
        context: list[tuple[Any, Any]] = []
        drafted: list[Any] = []
        logits: list[Any] = []
        for step in range(num_steps):
            hidden_TH = self._layer(tokens_T, hidden_TH, positions_T + step, context)
            normed_TH = self._norm(hidden_TH, "norm")
            logits_TD = normed_TH @ self.weights["lm_head.weight"].T
            if self.shape.norm_output:
                hidden_TH = normed_TH
            logits.append(logits_TD)
            drafted.append(self.target_ids_D[logits_TD.argmax(dim=-1)])
            if teacher_ids_T is None:
                tokens_T = drafted[-1]
            else:
                tokens_T = torch.cat([teacher_ids_T[2 + step :], teacher_ids_T.new_zeros(min(1 + step, len(tokens_T)))])
        return torch.stack(drafted, dim=1), torch.stack(logits)

    def _layer(self, tokens_T: Any, hidden_TH: Any, positions_T: Any, context: list[tuple[Any, Any]]) -> Any:
        """Run the decoder layer; `context` holds keys and values of the steps so far and gains those of this one."""
        embedded_TH = self.weights["embed_tokens.weight"][tokens_T]
        torch = import_torch()
        both = torch.cat([self._norm(embedded_TH, "input_layernorm"), self._norm(hidden_TH, "hidden_norm")], dim=-1)
        attended_TH = self._attention(both, positions_T, context)
        hidden_TH = hidden_TH + attended_TH
        inner = self._norm(hidden_TH, "post_attention_layernorm")
        gate = torch.nn.functional.silu(inner @ self.weights["mlp.gate_proj.weight"].T)
        return (
            hidden_TH + (gate * (inner @ self.weights["mlp.up_proj.weight"].T)) @ self.weights["mlp.down_proj.weight"].T
        )

    def _attention(self, both: Any, positions_T: Any, context: list[tuple[Any, Any]]) -> Any:
        torch = import_torch()
        num_positions, shape = len(positions_T), self.shape

        def heads(name: str, count: int) -> Any:
            projected = both @ self.weights[f"self_attn.{name}.weight"].T
            return projected.view(num_positions, count, shape.head_size).transpose(0, 1)

        cosine, sine = self._rotary(both[None], positions_T[None])
        queries_NTA = _rotate(heads("q_proj", shape.num_heads), cosine, sine)
        keys_MTA = _rotate(heads("k_proj", shape.num_key_heads), cosine, sine)
        group = shape.num_heads // shape.num_key_heads
        context.append(
            (
                keys_MTA.repeat_interleave(group, dim=0),
                heads("v_proj", shape.num_key_heads).repeat_interleave(group, dim=0),
            )
        )
        first_keys_NTA = context[0][0]
        scores = [queries_NTA @ first_keys_NTA.transpose(1, 2)]
        hidden_from = torch.ones(num_positions, num_positions, dtype=torch.bool).triu(1)
        scores[0] = scores[0].masked_fill(hidden_from, float("-inf"))
        # Of every later step a chain sees its own entry only: the diagonal.
        scores += [(queries_NTA * keys_NTA).sum(dim=-1, keepdim=True) for keys_NTA, _ in context[1:]]
        weights = torch.softmax(torch.cat(scores, dim=-1) * shape.head_size**-0.5, dim=-1)
        mixed_NTA = weights[..., :num_positions] @ context[0][1]
        for step, (_, values_NTA) in enumerate(context[1:]):
            mixed_NTA = mixed_NTA + weights[..., num_positions + step, None] * values_NTA
        joined = mixed_NTA.transpose(0, 1).reshape(num_positions, shape.num_heads * shape.head_size)
        return joined @ self.weights["self_attn.o_proj.weight"].T

    def _norm(self, values: Any, name: str) -> Any:
        scale = (values.pow(2).mean(dim=-1, keepdim=True) + self.shape.norm_eps).rsqrt()
        return values * scale * self.weights[f"{name}.weight"]


def _rotate(states: Any, cosine: Any, sine: Any) -> Any:
    torch = import_torch()
    first, second = states.chunk(2, dim=-1)
    return states * cosine[0] + torch.cat([-second, first], dim=-1) * sine[0]


def read_draft_shape(config: Mapping[str, Any]) -> DraftShape:
    """Read the shape from a draft's config.json: the trainer's nested form or the flat one of the engines.

    Raises:
        EvaluationError: The draft has parts that this forward pass does not have.
    """
    nested = config.get("transformer_layer_config")
    layer = dict(config if nested is None else nested)
    flags = {**config, **config.get("eagle_config", {})}
    problems = [
        f"{name} is {found!r}, expected {expected!r}"
        for name, found, expected in (
            ("model_type of the layer", layer.get("model_type"), "llama"),
            ("num_hidden_layers", layer.get("num_hidden_layers"), 1),
            ("norm_before_residual", flags.get("norm_before_residual", False), False),
            ("fc_norm", flags.get("fc_norm", False), False),
        )
        if found != expected
    ]
    if problems:
        raise EvaluationError(f"cannot run this draft: {'; '.join(problems)}. Train it with this project's settings.")
    hidden_size, num_heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
    rotary = ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings", "head_dim")
    kept = {name: layer[name] for name in rotary if layer.get(name) is not None}
    return DraftShape(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_key_heads=int(layer.get("num_key_value_heads") or num_heads),
        head_size=int(layer.get("head_dim") or hidden_size // num_heads),
        norm_eps=float(layer["rms_norm_eps"]),
        norm_before_fc=bool(flags.get("norm_before_fc", False)),
        norm_output=bool(flags.get("norm_output", False)),
        layer={**kept, "hidden_size": hidden_size, "num_attention_heads": num_heads},
    )


def load_draft(directory: Path) -> DraftModel:
    """Load a checkpoint or a bundle: `config.json` and `model.safetensors`."""
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text("utf-8"))
    return DraftModel(read_draft_shape(config), load_file(directory / "model.safetensors"))


def untrained_like(draft: DraftModel, seed: int) -> DraftModel:
    """Return a draft with the same shape, embedding, head and id maps, but random weights in between.

    It is the control of an evaluation: whatever it accepts is no merit of training.
    """
    torch = import_torch()
    generator = torch.Generator().manual_seed(seed)
    shared = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    tensors: dict[str, Any] = {}
    for name, tensor in sorted(draft.weights.items()):
        if name in shared:
            tensors[name] = tensor
        elif tensor.dim() == 1:
            tensors[name] = torch.ones_like(tensor)
        else:
            tensors[name] = torch.randn(tensor.shape, generator=generator) * 0.02
    return DraftModel(draft.shape, tensors)
