"""The corpus in the form the trainer reads: an arrow folder and the token frequencies, rows in corpus order.

Hidden states are not copied: row i of the arrow folder belongs to `hs_<i>.safetensors` of stage 6, which the trainer
reads in place. Train rows come first, then validation rows, and the trainer's split falls exactly between them.
"""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.artifacts import RunDirectory, StageManifest, verify_shard
from eagle3.drafter.extra import import_torch, require_train_extra
from eagle3.errors import ArtifactError, TrainingError
from eagle3.formats import CORPUS, corpus_loss_mask, read_rows

TOKEN_FREQUENCY_FILE = "token_freq.pt"
SPLITS = ("train", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRow:
    """One sample of the sealed corpus."""

    sample_id: str
    dataset: str
    split: str
    """`train` or `validation`."""
    input_ids: Sequence[int]
    """int32 ids, length T."""
    loss_mask: Sequence[bool]
    """Which ids carry loss, length T."""
    num_prompt_tokens: int


def read_corpus(run: RunDirectory, corpus: StageManifest) -> list[CorpusRow]:
    """Read the sealed corpus, train rows first: the order of the hidden states.

    Raises:
        CorruptShardError: A shard changed after it was sealed.
        ArtifactError: The corpus lists files of an unknown split.
    """
    rows: list[CorpusRow] = []
    for split in SPLITS:
        for shard in (shard for shard in corpus.shards if shard.path.startswith(f"{split}/")):
            path = verify_shard(run.stage_path(corpus.stage), shard)
            rows.extend(
                CorpusRow(
                    sample_id=row["sample_id"],
                    dataset=row["dataset"],
                    split=split,
                    input_ids=row["input_ids"],
                    loss_mask=corpus_loss_mask(row),
                    num_prompt_tokens=row["num_prompt_tokens"],
                )
                for row in read_rows(path, CORPUS)
            )
    unknown = sorted(shard.path for shard in corpus.shards if shard.path.split("/")[0] not in SPLITS)
    if unknown:
        raise ArtifactError(f"the corpus lists {unknown[:5]}, expected files under {SPLITS}. Redo the corpus stage.")
    return rows


def train_data_ratio(num_train: int, num_validation: int) -> float:
    """Return the ratio at which the trainer's split, `int(rows * ratio)`, falls right after the train rows.

    Half a row is added, because `int` of the plain quotient can be one row short: 100 * 0.29 is 28.999….

    Raises:
        TrainingError: A split is empty, which the trainer refuses.
    """
    if num_train < 1 or num_validation < 1:
        raise TrainingError(
            f"the corpus has {num_train} train and {num_validation} validation samples, expected at least one of each. "
            "Add prompts, or change corpus.validation_samples."
        )
    return (num_train + 0.5) / (num_train + num_validation)


def token_frequencies(rows: Sequence[CorpusRow]) -> dict[int, int]:
    """Count the ids that carry loss in the train rows; the draft vocabulary never looks at held-out rows."""
    counts: Counter[int] = Counter()
    for row in rows:
        if row.split == "train":
            counts.update(token for token, counted in zip(row.input_ids, row.loss_mask, strict=True) if counted)
    return dict(counts)


def write_trainer_data(rows: Sequence[CorpusRow], folder: Path, total_seq_len: int) -> None:
    """Write the arrow folder and `token_freq.pt`; whatever lay there before is deleted.

    The trainer reuses vocabulary files it finds, whatever data they were made from, so the folder starts empty.

    Raises:
        TrainingError: A sample is longer than a packed row, so that the trainer would cut it; or none carries loss.
        MissingExtraError: torch or datasets is not installed.
    """
    too_long = [row for row in rows if len(row.input_ids) > total_seq_len]
    if too_long:
        shown = [f"{row.sample_id} ({len(row.input_ids)} tokens)" for row in too_long[:5]]
        raise TrainingError(
            f"{len(too_long)} samples exceed training.total_seq_len {total_seq_len}: {shown}. Raise it, or lower "
            "corpus.max_sample_tokens."
        )
    frequencies = token_frequencies(rows)
    if not frequencies:
        raise TrainingError("no train sample has an id that carries loss: there is nothing to learn. Check the corpus.")
    require_train_extra("torch", "datasets")
    import datasets

    torch = import_torch()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    columns: dict[str, Any] = {
        "input_ids": [list(row.input_ids) for row in rows],
        "loss_mask": [[int(counted) for counted in row.loss_mask] for row in rows],
        "seq_len": [len(row.input_ids) for row in rows],
    }
    shown_bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(str(folder))
    finally:
        if not shown_bars:
            datasets.enable_progress_bars()
    torch.save(frequencies, folder / TOKEN_FREQUENCY_FILE)


def vocabulary_coverage(rows: Sequence[CorpusRow], draft_ids: frozenset[int]) -> Mapping[str, float]:
    """Return, per dataset and for `all`, the share of held-out loss-bearing ids that the draft can propose.

    It is a ceiling on acceptance.
    """
    seen: Counter[str] = Counter()
    covered: Counter[str] = Counter()
    for row in rows:
        if row.split != "validation":
            continue
        tokens = [token for token, counted in zip(row.input_ids, row.loss_mask, strict=True) if counted]
        num_covered = sum(token in draft_ids for token in tokens)
        for name in (row.dataset, "all"):
            seen[name] += len(tokens)
            covered[name] += num_covered
    return {name: round(covered[name] / count, 4) for name, count in sorted(seen.items()) if count}
