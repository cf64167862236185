import json

import pytest

from eagle3.drafter.target_facts import TargetFacts, check_capture, read_target_facts
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
