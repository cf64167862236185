import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle3.drafter.target_facts import TargetFacts, check_capture, check_final_norm, read_target_facts
from eagle3.errors import GateError, TargetError

FACTS = TargetFacts(
    architecture="LlamaForCausalLM", num_layers=30, hidden_size=576, vocab_size=49152, end_ids=(2,), bos_id=1
)
CONTRACT = {
    "layer_ids": (2, 15, 27),
    "num_layers": 30,
    "hidden_size": 576,
    "dtype": "bfloat16",
    "layer_convention": "input_of_layer",
    "order": "ascending",
    "final_slot": "pre_norm",
    "tokenizer_sha256": "abc",
}


def test_the_contract_of_the_target_passes():
    assert check_capture(CONTRACT, FACTS, None, "abc").layer_ids == (2, 15, 27)
    assert check_capture({**CONTRACT, "layer_ids": [1, 3]}, FACTS, (1, 3), "abc").layer_ids == (1, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_ids", [1, 14, 26]),
        ("layer_ids", [15, 2, 27]),
        ("num_layers", 32),
        ("hidden_size", 512),
        ("layer_convention", "output_of_layer"),
        ("order", "as_given"),
        ("final_slot", "post_norm"),
        ("tokenizer_sha256", "def"),
        ("final_slot", None),
    ],
)
def test_every_field_of_the_contract_is_compared(field, value):
    with pytest.raises(GateError, match=f"{field} is .*, expected .*eagle3 extract"):
        check_capture({**CONTRACT, field: value}, FACTS, None, "abc")


def test_facts_come_from_the_text_part_of_a_multimodal_target(tmp_path):
    text = {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 100, "eos_token_id": [3, 4]}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["KimiK25"], "text_config": text}))
    facts = read_target_facts(tmp_path)
    assert (facts.architecture, facts.num_layers, facts.end_ids, facts.bos_id) == ("KimiK25", 8, (3, 4), None)


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_an_unusable_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TargetError, match=r"config\.json of target"):
        read_target_facts(tmp_path)


@pytest.mark.parametrize("name", ["model.norm.weight", "language_model.model.norm.weight"])
def test_the_final_norm_is_found(tmp_path, name):
    save_file({name: np.ones(2)}, tmp_path / "model.safetensors")
    check_final_norm(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: "x"}}))
    (tmp_path / "model.safetensors").unlink()
    check_final_norm(tmp_path)


def test_a_norm_inside_a_layer_is_not_taken_for_the_final_one(tmp_path):
    tensors = {"model.layers.0.input_layernorm.weight": np.ones(2), "model.final_norm.weight": np.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(GateError, match=r"no tensor named 'model\.norm\.weight', found \['model\.final_norm"):
        check_final_norm(tmp_path)


def test_unreadable_weights_are_named(tmp_path):
    with pytest.raises(TargetError, match="cannot be read"):
        check_final_norm(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(TargetError, match="cannot be read"):
        check_final_norm(tmp_path)
