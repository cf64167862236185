import subprocess

import pytest

from eagle3.drafter.bundles import (
    expected_tensors,
    refuse_unservable,
    sglang_config,
    sglang_layer_ids,
    sglang_name,
)
from eagle3.drafter.serving import bundle_readme, serve_script
from eagle3.errors import ExportError

LAYER = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "layer_types": ["full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
CONFIG = {
    "transformer_layer_config": LAYER,
    "draft_vocab_size": 50,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "norm_before_residual": False,
    "norm_before_fc": True,
    "norm_output": True,
}


@pytest.mark.parametrize(
    ("change", "layer_change", "reason"),
    [
        ({"norm_before_residual": True}, {}, "norm_before_residual"),
        ({"embed_requires_grad": True}, {}, "embedding was trained"),
        ({}, {"model_type": "qwen3"}, "'qwen3' layer"),
        ({}, {"num_hidden_layers": 2}, "2 layers"),
        ({}, {"layer_types": ["sliding_attention"]}, "sliding window"),
    ],
)
def test_drafts_that_engines_run_wrongly_are_refused(change, layer_change, reason):
    refuse_unservable(CONFIG, "sglang")
    with pytest.raises(ExportError, match=reason):
        refuse_unservable({**CONFIG, **change, "transformer_layer_config": {**LAYER, **layer_change}}, "sglang")


def test_sglang_names_layers_by_their_output():
    assert sglang_layer_ids([2, 15, 27], "LlamaForCausalLM") == [1, 14, 26]
    assert sglang_layer_ids([2, 30, 58], "KimiK25ForConditionalGeneration") == [1, 29, 57]
    with pytest.raises(ExportError, match="layer 0"):
        sglang_layer_ids([0, 4], "LlamaForCausalLM")
    with pytest.raises(ExportError, match="only when it begins with 1"):
        sglang_layer_ids([3, 30, 58], "DeepseekV3ForCausalLM")


def test_the_config_is_flat_and_complete():
    config = sglang_config(CONFIG, "LlamaForCausalLM", {"bos_token_id": 1, "eos_token_id": 2})
    assert config["num_hidden_layers"] == 1
    assert config["rope_theta"] == 5000.0
    assert config["rope_scaling"] is None
    assert config["norm_output"] is True
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "norm_before_fc": True,
    }
    assert not {"layer_types", "sliding_window", "use_sliding_window", "transformer_layer_config"} & config.keys()


def test_scaled_rotary_embeddings_are_written_in_both_spellings():
    rope = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0}
    layer = {**LAYER, "rope_parameters": rope}
    config = sglang_config({**CONFIG, "transformer_layer_config": layer}, "LlamaForCausalLM", {})
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 64.0}
    assert config["rope_parameters"] == rope


def test_names_and_shapes_follow_the_config():
    shapes = expected_tensors(CONFIG)
    assert shapes["fc.weight"] == [64, 192]
    assert shapes["layers.0.self_attn.k_proj.weight"] == [32, 128]
    assert shapes["input_norm.weight"] == [192]
    assert shapes["d2t"] == [50]
    assert "d2t" not in expected_tensors({**CONFIG, "draft_vocab_size": 100})
    assert "input_norm.weight" not in expected_tensors({**CONFIG, "norm_before_fc": False})
    assert sglang_name("layers.0.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"
    assert sglang_name("norm.weight") == "norm.weight"


@pytest.mark.parametrize(
    ("engine", "wanted"), [("sglang", "--speculative-num-draft-tokens 4"), ("vllm", '"num_speculative_tokens\\": 3')]
)
def test_serve_scripts_are_valid_shell(tmp_path, engine, wanted):
    script = tmp_path / "serve.sh"
    script.write_text(serve_script(engine, 3))
    subprocess.run(["bash", "-n", script], check=True)
    assert wanted in script.read_text()
    assert subprocess.run(["bash", script], capture_output=True, check=False).returncode != 0


def test_the_readme_states_what_was_measured():
    evaluation = {
        "acceptance_length_trained": 1.7,
        "acceptance_length_untrained": 1.0,
        "standard_error": 0.03,
        "rounds": 900,
    }
    page = bundle_readme("vllm", "some-target", CONFIG, evaluation, 3)
    assert "| acceptance length | 1.7 ± 0.03 |" in page
    assert "input of these layers" in page
    assert "acceptance length |" not in bundle_readme("vllm", "some-target", CONFIG, {}, 3)
