"""A tiny target with answers of its own: random weights, spread norms, greedy continuations.

The weights are random, but the answers are what this model says, so the gates mean the same as on a real one: the last
state predicts the next id, earlier states predict it less the earlier they are.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle3.artifacts import RunDirectory, Stage
from eagle3.formats import CORPUS, write_rows
from eagle3.hidden_states.contract import CaptureContract
from eagle3.hidden_states.gates import GateSample
from eagle3.hidden_states.reading import CorpusRow
from eagle3.hidden_states.transformers_backend import TransformersBackend
from eagle3.recipe import Recipe, recipe_from_mapping
from eagle3.tokens.grammar import load_grammar

NUM_LAYERS = 8
HIDDEN = 32
PROMPT_TOKENS = 6
LAYER_IDS = (2, 4, 5)
NUM_ROWS = 24
NUM_VALIDATION = 4


def build_model(seed: int, vocab_size: int, end_id: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # spread factors, so that a norm applied twice shows
                weight.copy_(torch.empty_like(weight).uniform_(0.2, 3.0, generator=generator))
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.12)
        model.model.embed_tokens.weight.mul_(8)
    return model


def greedy_rows(model: Any, vocab_size: int) -> list[CorpusRow]:
    """Rows of different lengths: a random prompt, then what the model says."""
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab_size, (NUM_ROWS, PROMPT_TOKENS), generator=generator)
    with torch.inference_mode():
        for _ in range(24):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    rows: list[CorpusRow] = []
    for index, sequence in enumerate(ids.tolist()):
        kept = sequence[: len(sequence) - index % 11]
        mask = [False] * PROMPT_TOKENS + [True] * (len(kept) - PROMPT_TOKENS)
        rows.append(CorpusRow(input_ids=kept, loss_mask=mask))
    return rows


@dataclass(frozen=True, slots=True)
class AnsweringTarget:
    directory: Path
    vocab_size: int
    rows: list[CorpusRow]
    contract: CaptureContract


@pytest.fixture(scope="session")
def answering_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> AnsweringTarget:
    import transformers

    directory = tmp_path_factory.mktemp("answering-target")
    shutil.copytree(tiny_target, directory, dirs_exist_ok=True)
    grammar = load_grammar(directory / "grammar.yaml")
    vocab_size = grammar.tokenizer.vocab_size
    model = build_model(0, vocab_size, grammar.control["end"].id)
    model.save_pretrained(directory)
    return AnsweringTarget(
        directory=directory,
        vocab_size=vocab_size,
        rows=greedy_rows(model, vocab_size),
        contract=CaptureContract(
            target="tiny",
            layer_ids=LAYER_IDS,
            num_layers=NUM_LAYERS,
            hidden_size=HIDDEN,
            dtype="float32",
            tokenizer_sha256="a" * 64,
            weights_sha256="b" * 64,
            transformers_version=transformers.__version__,
        ),
    )


@pytest.fixture(scope="session")
def backend(answering_target: AnsweringTarget) -> TransformersBackend:
    return TransformersBackend(answering_target.directory, LAYER_IDS, "float32", num_threads=1)


@pytest.fixture(scope="session")
def samples(answering_target: AnsweringTarget, backend: TransformersBackend) -> list[GateSample]:
    """All rows of the tiny target, rightly captured."""
    states = backend.capture([row.input_ids for row in answering_target.rows])
    return [
        GateSample(row=index, input_ids=row.input_ids, loss_mask=row.loss_mask, hidden_TLH=state.clone())
        for index, (row, state) in enumerate(zip(answering_target.rows, states, strict=True))
    ]


@pytest.fixture
def recipe(answering_target: AnsweringTarget) -> Recipe:
    return recipe_from_mapping(
        {
            "name": "tiny",
            "target": {
                "name": "tiny",
                "weights": {"kind": "directory", "path": str(answering_target.directory)},
                "grammar": str(answering_target.directory / "grammar.yaml"),
                "mode": "plain",
            },
            "prompts": {"datasets": [{"name": "chat", "path": "chat.jsonl"}]},
            "generation": {
                "provider": {"kind": "openai", "base_url": "http://localhost:1", "model": "tiny"},
                "budget_usd": "1",
            },
            "corpus": {"max_sample_tokens": 64},
            "hidden_states": {
                "dtype": "float32",
                "batch_tokens": 64,
                "gate_samples": 12,
                "disk_reserve_bytes": 0,
                "num_threads": 1,
            },
        },
        answering_target.directory,
    )


@pytest.fixture
def run(tmp_path: Path, answering_target: AnsweringTarget) -> RunDirectory:
    """A run with a sealed corpus: 20 train rows in two files, 4 validation rows."""
    run = RunDirectory(tmp_path / "run")
    stage = run.open_stage(Stage.CORPUS, {"corpus": {}}, {})
    cuts = {"validation/shard-00000.parquet": (20, 24), "train/shard-00000.parquet": (0, 12)}
    cuts["train/shard-00001.parquet"] = (12, 20)
    shards = []
    for path, (start, stop) in cuts.items():
        entries = [_corpus_entry(index, answering_target.rows[index]) for index in range(start, stop)]
        shards.append(
            stage.commit_shard(
                path, lambda file, entries=entries: write_rows(file, entries, CORPUS), num_samples=stop - start
            )
        )
    stage.seal(shards, {})
    return run


def _corpus_entry(index: int, row: CorpusRow) -> dict[str, Any]:
    return {
        "sample_id": f"{index:032x}",
        "dataset": "chat",
        "input_ids": list(row.input_ids),
        "num_prompt_tokens": PROMPT_TOKENS,
        "segments": [
            {"kind": "prompt", "start": 0, "stop": PROMPT_TOKENS},
            {"kind": "content", "start": PROMPT_TOKENS, "stop": len(row.input_ids)},
        ],
        "exactness": "exact_ids",
        "provider": "tiny",
        "finish_reason": "length",
    }


@pytest.fixture(scope="session")
def other_target(answering_target: AnsweringTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture and tokenizer with other weights."""
    directory = tmp_path_factory.mktemp("other-target")
    shutil.copytree(answering_target.directory, directory, dirs_exist_ok=True)
    end_id = load_grammar(directory / "grammar.yaml").control["end"].id
    build_model(7, answering_target.vocab_size, end_id).save_pretrained(directory)
    return directory
