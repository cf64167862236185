"""A tiny random target, a run with its answers and hidden states, and a recipe that trains on them."""

from pathlib import Path

import pytest

from eagle3.artifacts import RunDirectory, Stage
from eagle3.formats import CORPUS, hidden_states_name, write_rows
from eagle3.recipe import Recipe, recipe_from_mapping

torch = pytest.importorskip("torch")

LAYER_IDS = (2, 4, 5)
VOCABULARY = 128
NUM_TRAIN, NUM_VALIDATION = 40, 9
PROMPT_TOKENS, ANSWER_TOKENS = 6, 24


def make_recipe(folder: Path, **training: object) -> Recipe:
    document = {
        "name": "tiny",
        "target": {"name": "tiny-target", "weights": {"kind": "directory", "path": "target"}, "grammar": "chatml"},
        "prompts": {"datasets": [{"name": "a", "path": "a.jsonl"}]},
        "generation": {"provider": {"kind": "openai", "base_url": "http://127.0.0.1:1", "model": "m"}, "budget_usd": 1},
        "corpus": {"max_sample_tokens": 64, "validation_samples": NUM_VALIDATION},
        "hidden_states": {"dtype": "float32"},
        "training": {
            "epochs": 6,
            "learning_rate": 0.01,
            "total_seq_len": 128,
            "draft_vocab_size": 96,
            "dtype": "float32",
            "num_threads": 1,
            **training,
        },
        "evaluation": {"max_prompts": NUM_VALIDATION, "max_new_tokens": ANSWER_TOKENS},
    }
    return recipe_from_mapping(document, folder)


def make_target(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(0.0, 0.09)
        else:
            parameter.data.uniform_(0.7, 1.3)
    model.save_pretrained(folder)
    return folder


def make_run(folder: Path, target: Path) -> RunDirectory:
    """A run with a sealed corpus (greedy answers of the target) and its hidden states."""
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    run = RunDirectory(folder)
    rows = []
    states = run.open_stage(Stage.HIDDEN_STATES, {}, {})
    files = []
    for index in range(NUM_TRAIN + NUM_VALIDATION):
        prompt = torch.randint(3, VOCABULARY, (1, PROMPT_TOKENS), generator=generator)
        with torch.inference_mode():
            ids = model.generate(prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=2)
            hidden = model(ids, output_hidden_states=True).hidden_states
            captured = {}
            hook = model.model.norm.register_forward_pre_hook(lambda _, args, kept=captured: kept.update(last=args[0]))
            model(ids)
            hook.remove()
        input_ids = ids[0].tolist()
        slots = torch.stack([*(hidden[layer][0] for layer in LAYER_IDS), captured["last"][0]], dim=1).contiguous()
        tensors = {"hidden_states": slots, "token_ids": ids[0].clone()}
        files.append(
            states.commit_shard(
                hidden_states_name(index),
                lambda path, tensors=tensors: save_file(tensors, path),
                num_samples=1,
                num_tokens=len(input_ids),
            )
        )
        rows.append(
            {
                "sample_id": f"{index:032x}",
                "dataset": "ab"[index % 2],
                "input_ids": input_ids,
                "num_prompt_tokens": PROMPT_TOKENS,
                "segments": [
                    {"kind": "prompt", "start": 0, "stop": PROMPT_TOKENS},
                    {"kind": "content", "start": PROMPT_TOKENS, "stop": len(input_ids)},
                ],
                "exactness": "exact_ids",
                "provider": "p",
                "finish_reason": "length",
            }
        )
    contract = {
        "layer_ids": list(LAYER_IDS),
        "num_layers": 8,
        "hidden_size": 64,
        "dtype": "float32",
        "layer_convention": "input_of_layer",
        "order": "ascending",
        "final_slot": "pre_norm",
        "tokenizer_sha256": "tokenizer digest",
    }
    states.seal(files, {"contract": contract})
    corpus = run.open_stage(Stage.CORPUS, {}, {"tokenizer": "tokenizer digest"})
    shards = [
        corpus.commit_shard(
            f"{split}/shard-00000.parquet",
            lambda path, part=part: write_rows(path, part, CORPUS),
            num_samples=len(part),
        )
        for split, part in (("train", rows[:NUM_TRAIN]), ("validation", rows[NUM_TRAIN:]))
    ]
    corpus.seal(shards, {})
    return run
