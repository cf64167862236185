"""What is computed in where a processor lacks the wanted arithmetic."""

from types import SimpleNamespace
from typing import Any

import pytest

from eagle3 import precision

torch: Any = pytest.importorskip("torch")


def machine(monkeypatch: pytest.MonkeyPatch, *, accelerator: str | None, kernels: SimpleNamespace) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_kwargs: accelerator)
    monkeypatch.setattr(torch.ops, "mkldnn", kernels)


@pytest.mark.parametrize(
    ("accelerator", "kernels", "expected"),
    [
        ("cuda", SimpleNamespace(), True),
        (None, SimpleNamespace(_is_mkldnn_bf16_supported=lambda: True), True),
        (None, SimpleNamespace(_is_mkldnn_bf16_supported=lambda: False), False),
        (None, SimpleNamespace(), False),
    ],
    ids=["accelerator", "processor that has it", "processor that lacks it", "torch without such kernels"],
)
def test_where_bfloat16_is_fast(
    monkeypatch: pytest.MonkeyPatch, accelerator: str | None, kernels: SimpleNamespace, expected: bool
) -> None:
    machine(monkeypatch, accelerator=accelerator, kernels=kernels)
    assert precision.has_fast_bfloat16() is expected
    assert precision.compute_dtype("bfloat16") == ("bfloat16" if expected else "float32")
    assert precision.compute_dtype("float32") == "float32"


def test_torch_still_has_the_question_that_is_asked() -> None:
    assert isinstance(torch.ops.mkldnn._is_mkldnn_bf16_supported(), bool)
