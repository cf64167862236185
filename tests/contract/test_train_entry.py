"""What the training process changes for the machine it runs on, against torch's own optimizer."""

import importlib

import pytest

from eagle3.drafter import train_entry
from eagle3.drafter.train_entry import newton_schulz

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("shape", [(24, 56), (56, 24), (32, 32)], ids=["wide", "tall", "square"])
def test_our_orthogonal_step_is_that_of_torch_in_float32(monkeypatch, shape):
    torchs = importlib.import_module("torch.optim._muon")._zeropower_via_newtonschulz
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    kept = gradient.clone()
    ours = newton_schulz(gradient, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert torch.equal(gradient, kept)
    rounded = torchs(gradient, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(ours, rounded.float(), atol=0.05, rtol=0)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    torch.testing.assert_close(ours, torchs(gradient, (3.4445, -4.775, 2.0315), 5, 1e-7))


@pytest.mark.parametrize("is_fast", [True, False])
def test_muon_avoids_bfloat16_only_where_it_is_slow(monkeypatch, is_fast):
    muon = importlib.import_module("torch.optim._muon")
    # Put back afterwards whatever is put in its place meanwhile.
    monkeypatch.setattr(muon, "_zeropower_via_newtonschulz", muon._zeropower_via_newtonschulz)
    monkeypatch.setattr(train_entry, "has_fast_bfloat16", lambda: is_fast)
    monkeypatch.setattr(train_entry, "patch_for_cpu", lambda: None)
    conversions: list[torch.dtype] = []
    plain = torch.Tensor.bfloat16
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: conversions.append(self.dtype) or plain(self))
    train_entry.adapt_to_machine()
    weight = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = torch.optim.Muon([weight], lr=0.1)
    weight.grad = torch.arange(24.0).reshape(4, 6)
    optimizer.step()
    assert not torch.equal(weight.detach(), torch.ones(4, 6))
    assert bool(conversions) is is_fast
