"""What torch has to compute with on this machine, and what it computes in without the wanted arithmetic."""

import importlib
from typing import Any


def compute_dtype(wanted: str) -> str:
    """Return the dtype to compute in, where `wanted` is the dtype of what is kept.

    A processor without instructions for bfloat16 emulates it, 3 to 30 times slower than float32 depending on the
    product (tests/bench/bench_precision.py). float32 holds every bfloat16 value, so such a machine computes in it and
    rounds once, at the end. It takes twice the memory for weights.

    Args:
        wanted: `bfloat16` or `float32`.

    Returns:
        `wanted` where there is an accelerator or a processor that has it, else `float32`.
    """
    return wanted if wanted != "bfloat16" or has_fast_bfloat16() else "float32"


def has_accelerator() -> bool:
    """Whether torch sees an accelerator on this machine."""
    torch: Any = importlib.import_module("torch")
    return torch.accelerator.current_accelerator(check_available=True) is not None


def has_fast_bfloat16() -> bool:
    """Whether torch has an accelerator here, or bfloat16 kernels for this processor."""
    torch: Any = importlib.import_module("torch")
    if has_accelerator():
        return True
    # The one place that knows which kernels this build picks; torch's own compiler asks here too.
    supported: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())
