"""How fast a draft trains on this CPU: tokens per second of forward, backward and optimizer, by setting.

Usage: `python tests/bench/bench_training.py TARGET_DIR [--threads N]`. The first row, plain eager attention in float32
with muon, is the control; every other row changes what it names. Figures are per CPU second too, which other work on
the machine disturbs less.
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

STEPS = 6
CONTROL: dict[str, Any] = {
    "draft_vocab": 4096,
    "attention": "eager",
    "dtype": "float32",
    "optimizer": "muon",
    "tokens": 512,
    "loss": "kl_div",
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"attention": "sdpa"},
    {"attention": "sdpa", "dtype": "bfloat16"},
    {"attention": "sdpa", "dtype": "bfloat16", "optimizer": "adamw"},
    {"attention": "sdpa", "dtype": "bfloat16", "tokens": 1024},
    {"attention": "sdpa", "dtype": "bfloat16", "draft_vocab": 8192},
    {"attention": "sdpa", "dtype": "bfloat16", "loss": "ce"},
)


def build_draft(target: Path, draft_vocab: int, attention: str) -> Any:
    import torch
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.utils import get_verifier_config
    from speculators.train.cli import create_transformer_layer_config

    facts = get_verifier_config(str(target))
    layer = create_transformer_layer_config(str(target), 1, "llama", "silu", 2048, [0])
    kept = torch.zeros(facts.vocab_size, dtype=torch.bool)
    kept[:draft_vocab] = True
    n = facts.num_hidden_layers
    return Eagle3DraftModel.from_training_args(
        layer,
        t2d=kept,
        d2t=torch.zeros(draft_vocab, dtype=torch.long),
        target_layer_ids=[2, n // 2, n - 3],
        verifier_name_or_path=str(target),
        draft_vocab_size=draft_vocab,
        norm_before_residual=False,
        norm_before_fc=True,
        norm_output=True,
        draft_attn_impl=attention,
        ttt_steps=3,
    )


def measure(target: Path, setting: dict[str, Any]) -> tuple[float, float]:
    """Return tokens per second and per CPU second."""
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    draft = build_draft(target, setting["draft_vocab"], setting["attention"]).float().train()
    config = TrainerConfig(lr=1e-3, num_epochs=1, save_path="", optimizer=setting["optimizer"], muon_lr=1e-3)
    optimizers = build_optimizers(draft, config)
    dtype = getattr(torch, setting["dtype"])
    length, hidden = setting["tokens"], draft.hidden_size
    batch = {
        "hidden_states": torch.randn(1, length, 3 * hidden, dtype=dtype),
        "verifier_last_hidden_states": torch.randn(1, length, hidden, dtype=dtype),
        "input_ids": torch.randint(0, setting["draft_vocab"], (1, length)),
        "document_ids": (torch.arange(length) // 128)[None],
        "loss_mask": torch.ones(1, length, dtype=torch.long),
    }
    loss_config = resolve_loss_config(setting["loss"], "eager")
    started = cpu_started = 0.0
    for step in range(STEPS + 1):
        if step == 1:
            started, cpu_started = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", dtype=dtype):
            _, loss, _ = draft(**batch, ttt_steps=3, loss_config=loss_config)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
    tokens = STEPS * length
    return tokens / (time.perf_counter() - started), tokens / (time.process_time() - cpu_started)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")

    import torch
    from loguru import logger

    logger.disable("speculators")
    torch.set_num_threads(arguments.threads)
    control: float | None = None
    for change in VARIANTS:
        wall, cpu = measure(arguments.target, {**CONTROL, **change})
        control = control or cpu
        name = ", ".join(f"{key} {value}" for key, value in change.items()) or "control"
        print(f"{name:60} {wall:7.0f} tok/s  {cpu:7.0f} tok/CPU-s  {cpu / control:5.2f}x")


if __name__ == "__main__":
    main()
