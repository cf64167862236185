"""Every setting of the speculators trainer, chosen by us and passed by name.

The trainer's defaults change between releases (optimizer, norms, attention window), and several of them give a draft
that an engine cannot serve. So none is left to its default: `trainer_settings` returns a value for each field that a
draft of this kind reads, and a contract test fails when the trainer grows a field that is not listed here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from eagle3.recipe import Training

SettingValue: TypeAlias = str | int | float | bool | list[int] | None

SUPPORTED_SPECULATORS = "0.9.0"
"""The release these settings and `train_entry` were tested with."""

WARMUP_SHARE = 0.01
"""Share of all steps over which the learning rate rises; the trainer's own choice when told nothing."""

SLIDING_WINDOW_UNUSED = 2048
"""The trainer wants a window size even when every layer has full attention."""


def trainer_settings(
    training: Training,
    *,
    target: Path,
    data: Path,
    hidden_states: Path,
    checkpoints: Path,
    layer_ids: Sequence[int],
    mask_token_id: int,
    train_data_ratio: float,
    has_accelerator: bool,
    compute_dtype: str,
) -> dict[str, SettingValue]:
    """Return the flat settings of one training run, each field named as the trainer names it.

    Args:
        training: Section of the recipe.
        target: Hugging Face directory of the target.
        data: Folder with the tokenized samples and `token_freq.pt`.
        hidden_states: Folder with the sealed `hs_<row>.safetensors`; read in place.
        checkpoints: Where the trainer writes one folder per epoch.
        layer_ids: Captured layers, input-of-layer convention.
        mask_token_id: Any id of the target; drafts of this kind never use it, but the trainer would load a tokenizer
            to find one.
        train_data_ratio: See `eagle3.drafter.dataset.train_data_ratio`.
        has_accelerator: Without one the kernels that exist for accelerators only are replaced by plain ones.
        compute_dtype: Of the forward pass: `training.dtype`, or what this machine computes in instead.
    """
    return {
        "speculator_type": "eagle3",
        "dry_run": False,
        "seed": training.seed,
        "deterministic_cuda": True,
        "verifier_name_or_path": str(target),
        "trust_remote_code": False,
        **_draft_settings(training, layer_ids, mask_token_id, has_accelerator=has_accelerator),
        **_data_settings(training, data, train_data_ratio, compute_dtype),
        **_loss_and_optimizer_settings(training, has_accelerator=has_accelerator),
        "epochs": training.epochs,
        "checkpoint_freq": 1.0,
        "save_best": False,
        "no_resume_from_checkpoint": False,
        "log_freq": 1,
        "save_path": str(checkpoints),
        "fsdp_shard": False,
        "gradient_checkpointing": False,
        "max_steps": None,
        "logger": "",
        "log_dir": str(checkpoints.parent / "logs"),
        "run_name": None,
        "hidden_states_path": str(hidden_states),
    }


def _draft_settings(
    training: Training, layer_ids: Sequence[int], mask_token_id: int, *, has_accelerator: bool
) -> dict[str, SettingValue]:
    return {
        "from_pretrained": "",
        "draft_config": "",
        "num_layers": training.num_layers,
        "draft_arch": "llama",
        "draft_hidden_act": "silu",
        "draft_mrope_full_head_hack": True,
        "target_layer_ids": list(layer_ids),
        "token_freq_path": None,
        "draft_vocab_size": training.draft_vocab_size,
        "d2t_path": None,
        "t2d_path": None,
        "mask_token_id": mask_token_id,
        # SGLang has no norm_before_residual: a draft trained with it loads there without an error and accepts nothing.
        "norm_before_residual": False,
        "embed_requires_grad": False,
        "norm_before_fc": training.norm_before_fc,
        "fc_norm": False,
        "norm_output": training.norm_output,
        "sliding_window": SLIDING_WINDOW_UNUSED,
        "full_attention_indices": list(range(training.num_layers)),
        "sliding_window_non_causal": False,
        # Flex attention has no backward pass on CPU.
        "draft_attn_impl": "simple_flex_attention" if has_accelerator else "sdpa",
    }


def _data_settings(
    training: Training, data: Path, train_data_ratio: float, compute_dtype: str
) -> dict[str, SettingValue]:
    return {
        "data_path": str(data),
        "hidden_states_backend": "file",
        "total_seq_len": training.total_seq_len,
        "train_data_ratio": train_data_ratio,
        # Of the forward pass alone: checkpoints are bfloat16 in any case.
        "hidden_states_dtype": compute_dtype,
        "num_workers": 0,
        "prefetch_factor": 4,
        "max_anchors": 512,
        "vllm_endpoint": "",
        # `generate` would look for a server, `skip` and `warn` would train on less without failing.
        "on_missing": "raise",
        "request_timeout": 1.0,
        "max_retries": 0,
        "generation_validation_retries": 0,
        "max_consecutive_generation_failures": 1,
    }


def _loss_and_optimizer_settings(training: Training, *, has_accelerator: bool) -> dict[str, SettingValue]:
    return {
        # The fused losses are Triton kernels.
        "loss_implementation": "fused" if has_accelerator else "eager",
        "loss_fn": "kl_div",
        "ttt_steps": training.ttt_steps,
        "ttt_step_loss_decay": 1.0,
        "optimizer": "muon",
        "lr": training.learning_rate,
        "weight_decay": 0.01,
        "muon_lr": training.learning_rate,
        "muon_momentum": 0.95,
        "muon_weight_decay": 0.1,
        "muon_ns_steps": 5,
        "muon_adjust_lr_fn": "match_rms_adamw",
        "scheduler_type": "linear",
        "scheduler_warmup_steps": None,
        "scheduler_warmup_ratio": WARMUP_SHARE,
        "scheduler_total_steps": None,
        "scheduler_num_cosine_cycles": 0.5,
    }


OTHER_DRAFT_KINDS: Mapping[str, str] = {
    "dflash": "block diffusion drafts",
    "dflash2": "block diffusion drafts",
    "dspark": "block diffusion drafts",
    "xpress": "block diffusion drafts",
    "peagle": "parallel drafts",
    "mtp": "multi-token-prediction heads",
}
"""Setting groups that no draft of this kind reads, with what they are for."""

DEPRECATED_SETTINGS = frozenset({"on_generate"})
"""Fields without effect whose mere mention makes the trainer warn."""
