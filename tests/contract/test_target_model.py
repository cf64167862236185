"""The target in memory: its own greedy words, its own layers, computed in what the machine can."""

import pytest

from eagle3.drafter.continuation import TargetModel
from tests.contract.tiny_drafter import LAYER_IDS, make_target

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


def test_continuations_are_those_of_plain_greedy_decoding(target):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ours = TargetModel(target, "float32", 1)
    prompts = [[5, 9, 11], [7, 3, 21, 40, 41, 42, 43], [99]]
    answers = ours.continue_greedily(prompts, (2,), 12, lambda done: None)
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=2)
        assert answer == wanted[0, len(prompt) :].tolist()


def test_features_are_inputs_of_layers_side_by_side(target):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = [5, 9, 11, 30]
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    found = TargetModel(target, "float32", 1).features(ids, LAYER_IDS)
    torch.testing.assert_close(found, torch.cat([states[layer][0] for layer in LAYER_IDS], dim=-1))


def test_without_bfloat16_arithmetic_features_are_those_of_float32(target, monkeypatch):
    monkeypatch.setattr("eagle3.precision.has_fast_bfloat16", lambda: False)
    ids = [5, 9, 11, 30]
    found = TargetModel(target, "bfloat16", 1).features(ids, LAYER_IDS)
    assert torch.equal(found, TargetModel(target, "float32", 1).features(ids, LAYER_IDS))
