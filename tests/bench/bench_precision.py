"""What bfloat16 costs on this CPU: the matrix products of training, beside the same ones in float32, the control.

Usage: `python tests/bench/bench_precision.py [--threads N] [--tokens T]`. Shapes are those of one projection of the
example target. Above 1 bfloat16 is slower; `eagle3.precision` then computes in float32 if torch says that it has no
kernels for this processor, and this shows whether torch is right.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

from eagle3.precision import has_fast_bfloat16

HIDDEN, INTERMEDIATE = 576, 1536
MIN_SECONDS = 0.5


def seconds_per_call(call: Callable[[], object]) -> float:
    call()
    calls, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < MIN_SECONDS:
        call()
        calls += 1
    return spent / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(arguments.threads)
    inputs = torch.randn(arguments.tokens, HIDDEN)
    weight = torch.randn(INTERMEDIATE, HIDDEN)
    gradient = torch.randn(arguments.tokens, INTERMEDIATE)
    products = {
        "forward": (inputs, weight.T),
        "gradient of inputs": (gradient, weight),
        "gradient of weights": (gradient.T, inputs),
        "Newton-Schulz of Muon": (weight.T, weight),
    }
    print(f"torch has bfloat16 kernels for this processor: {has_fast_bfloat16()}")
    for name, (left, right) in products.items():
        control, narrow = (
            seconds_per_call(partial(torch.matmul, left.to(dtype), right.to(dtype)))
            for dtype in (torch.float32, torch.bfloat16)
        )
        print(f"{name:24} float32 {control * 1e3:8.2f} ms   bfloat16 {narrow * 1e3:8.2f} ms   {narrow / control:6.2f}x")


if __name__ == "__main__":
    main()
