"""What extraction reads: the rows of the corpus, and the shape and weights of the target."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.artifacts import RunDirectory, Stage, StageManifest, sha256_file, verify_shard
from eagle3.errors import CorruptShardError, GateError, TargetError
from eagle3.formats import CORPUS, corpus_loss_mask, hidden_states_name, read_rows
from eagle3.records import canonical_json, sha256_text

SPLITS = ("train", "validation")
"""Order of the rows: all of the first, then all of the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRow:
    """One row of the corpus as extraction needs it."""

    input_ids: Sequence[int]
    loss_mask: Sequence[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """Figures of the target's config.json."""

    num_layers: int
    hidden_size: int
    vocab_size: int


def read_corpus(run: RunDirectory, corpus: StageManifest) -> list[CorpusRow]:
    """Read the sealed corpus in row order: train shards, then validation shards.

    Raises:
        CorruptShardError: A file changed, is of no known split, or the corpus is empty.
    """
    unknown = [shard.path for shard in corpus.shards if shard.path.split("/")[0] not in SPLITS]
    if unknown or not corpus.shards:
        raise CorruptShardError(
            f"the corpus lists {len(corpus.shards)} files, outside of {list(SPLITS)}: {unknown[:5]}; expected at "
            "least one, all of them inside. Run 'eagle3 corpus' again."
        )
    rows: list[CorpusRow] = []
    for split in SPLITS:
        for shard in corpus.shards:
            if shard.path.split("/")[0] == split:
                path = verify_shard(run.stage_path(Stage.CORPUS), shard)
                rows.extend(
                    CorpusRow(input_ids=row["input_ids"], loss_mask=corpus_loss_mask(row))
                    for row in read_rows(path, CORPUS)
                )
    return rows


def read_target_shape(target: Path) -> TargetShape:
    """Read config.json of the target; of a multimodal one, its text part.

    Raises:
        TargetError: The file is missing or lacks a figure.
    """
    try:
        config: Mapping[str, Any] = json.loads((target / "config.json").read_text("utf-8"))
        text: Mapping[str, Any] = config.get("text_config", config)
        return TargetShape(
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise TargetError(
            f"config.json of target {target.name!r} cannot be used ({type(exc).__name__}: {exc}): expected layers, "
            "hidden size and vocabulary size of a causal language model. Check the directory."
        ) from exc


def digest_weights(target: Path) -> str:
    """Return the sha256 over the target's configuration and safetensors files, by name and content.

    Raises:
        TargetError: There are none, or no configuration.
    """
    files = [target / "config.json", *sorted(target.glob("*.safetensors"))]
    if len(files) == 1 or not files[0].is_file():
        raise TargetError(
            f"target {target.name!r} has {len(files) - 1} '*.safetensors' files, expected at least one, and a "
            "config.json beside them: there are no weights to run. Complete the directory."
        )
    return sha256_text(canonical_json([[path.name, sha256_file(path)] for path in files]))


def check_ids(rows: Sequence[CorpusRow], vocab_size: int) -> None:
    """Require that the target has an embedding for every id of the corpus.

    Raises:
        GateError: It has not.
    """
    for row, entry in enumerate(rows):
        if max(entry.input_ids) >= vocab_size or min(entry.input_ids) < 0:
            raise GateError(
                f"corpus row {row} ({hidden_states_name(row)!r}) holds ids from {min(entry.input_ids)} to "
                f"{max(entry.input_ids)}, the target knows 0 to {vocab_size - 1}: corpus and target do not belong "
                "together. Check target.grammar and target.weights."
            )
