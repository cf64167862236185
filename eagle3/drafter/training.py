"""Stage 7: train the draft.

The stage folder holds `checkpoint/config.json` and `checkpoint/model.safetensors`: the final epoch as the trainer wrote
it, except that the target is named and not located. `work/` below it holds the trainer's data, logs and all epochs; it
is not part of what is sealed.
"""

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

from eagle3.artifacts import OpenStage, RunDirectory, ShardRef, Stage, StageManifest, verify_shard
from eagle3.drafter.dataset import CorpusRow, read_corpus, train_data_ratio, vocabulary_coverage, write_trainer_data
from eagle3.drafter.draft_model import load_draft
from eagle3.drafter.extra import require_train_extra
from eagle3.drafter.target_facts import check_capture, check_final_norm, read_target_facts
from eagle3.drafter.trainer_process import TrainerJob, read_metrics, run_trainer
from eagle3.drafter.trainer_settings import SUPPORTED_SPECULATORS, trainer_settings
from eagle3.errors import GateError, TrainingError
from eagle3.formats import hidden_states_name
from eagle3.precision import compute_dtype, has_accelerator
from eagle3.progress import Progress, ProgressEvent, no_progress
from eagle3.recipe import Recipe

CHECKPOINT_FOLDER = "checkpoint"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MAX_CURVE_POINTS = 400
PROGRESS_INTERVAL_S = 1.0


def train_draft(recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress) -> StageManifest:
    """Train a draft on the sealed corpus and hidden states, and seal its final checkpoint.

    A killed or stopped training goes on after its last complete epoch.

    Args:
        recipe: Section `training`; `hidden_states.layer_ids` is compared with what was extracted.
        run: Holds the sealed corpus and hidden states.
        target: Prepared directory of the target.
        progress: Told the loss about once a second.

    Returns:
        The sealed manifest; an earlier one when nothing changed.

    Raises:
        GateError: The hidden states are not of this target, or not of this corpus.
        TrainingError: The trainer ended without its final checkpoint.
        StoppedError: The process was asked to stop; complete epochs are kept.
        MissingExtraError: torch or the trainer is not installed.
        StageDriftError: The draft was sealed from other settings.
    """
    corpus, states = run.sealed(Stage.CORPUS), run.sealed(Stage.HIDDEN_STATES)
    identity = {"training": recipe.training.identity(), "trainer": f"speculators {SUPPORTED_SPECULATORS}"}
    inputs = {manifest.stage.value: manifest.digest for manifest in (corpus, states)}
    stage = run.open_stage(Stage.DRAFT, identity, inputs)
    if stage.manifest is not None:
        return stage.manifest
    require_train_extra("torch", "transformers", "datasets", "safetensors", "speculators")
    facts = read_target_facts(target)
    tokenizer = corpus.inputs.get("tokenizer", "")
    capture = check_capture(states.stats["contract"], facts, recipe.hidden_states.layer_ids, tokenizer)
    check_final_norm(target)
    rows = read_corpus(run, corpus)
    check_same_rows(rows, states.shards)
    for shard in states.shards:
        verify_shard(run.stage_path(states.stage), shard)
    started = time.monotonic()
    work = stage.path / "work" / stage.fingerprint[:12]
    work.mkdir(parents=True, exist_ok=True)
    write_trainer_data(rows, work / "data", recipe.training.total_seq_len)
    num_validation = sum(row.split == "validation" for row in rows)
    if not facts.end_ids:
        raise GateError(
            f"config.json of target {target.name!r} names no end id (eos_token_id), which training needs. Add it."
        )
    computed_in = compute_dtype(recipe.training.dtype)
    job = TrainerJob(
        settings=trainer_settings(
            recipe.training,
            target=target.resolve(),
            data=(work / "data").resolve(),
            hidden_states=run.stage_path(states.stage).resolve(),
            checkpoints=(work / "checkpoints").resolve(),
            layer_ids=capture.layer_ids,
            mask_token_id=facts.end_ids[0],
            train_data_ratio=train_data_ratio(len(rows) - num_validation, num_validation),
            has_accelerator=has_accelerator(),
            compute_dtype=computed_in,
        ),
        folder=work,
        num_threads=recipe.training.num_threads,
    )
    reporter = _Reporter(progress, recipe.training.epochs)
    run_trainer(job, reporter)
    shards = _commit_checkpoint(
        stage, job.checkpoints / str(recipe.training.epochs - 1), recipe, target, len(rows) - num_validation
    )
    draft = load_draft(stage.file(CHECKPOINT_FOLDER))
    stats = {
        **training_stats(read_metrics(job.metrics)),
        "wall_s": round(time.monotonic() - started, 1),
        "train_samples": len(rows) - num_validation,
        "validation_samples": num_validation,
        "trained_parameters": draft.num_parameters,
        "draft_vocab_coverage": vocabulary_coverage(rows, frozenset(draft.target_ids_D.tolist())),
        "layer_ids": list(capture.layer_ids),
        "device": reporter.device,
        "computed_in": computed_in,
    }
    return stage.seal(shards, stats)


def copy_weights(source: Path, path: Path) -> None:
    """Write a copy of `source` to `path`."""
    copyfile(source, path)


def check_same_rows(rows: Sequence[CorpusRow], shards: Sequence[ShardRef]) -> None:
    """Check that there is one file of hidden states per corpus row, of the same length.

    Raises:
        GateError: Files are missing or do not fit; the trainer would drop such samples with a warning only.
    """
    by_path = {shard.path: shard for shard in shards}
    missing = [hidden_states_name(row) for row in range(len(rows)) if hidden_states_name(row) not in by_path]
    if missing:
        raise GateError(
            f"{len(missing)} of {len(rows)} corpus rows lack hidden states: {missing[:5]}. Run 'eagle3 extract' again."
        )
    for index, row in enumerate(rows):
        shard = by_path[hidden_states_name(index)]
        if shard.num_tokens != len(row.input_ids):
            raise GateError(
                f"{shard.path!r} holds {shard.num_tokens} tokens, its sample {row.sample_id!r} has {len(row.input_ids)}"
                ": the corpus changed after extraction. Run 'eagle3 extract' again."
            )


def training_stats(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Condense metric records into what reports show.

    Args:
        events: Records of the trainer, each with `train` or `val` and `epoch`.

    Returns:
        Steps, the final loss (mean of the last twentieth of the steps, summed over the chained steps of the draft),
        accuracy per chained step, a curve of at most 400 points, and the validation figures of every epoch.
    """
    train = [(int(event["global_step"]), event["train"]) for event in events if "train" in event]
    if not train:
        return {"steps": 0, "final_loss": None, "loss_curve": [], "validation": []}
    last = [metrics for _, metrics in train[-max(1, len(train) // 20) :]]
    stride = -(-len(train) // MAX_CURVE_POINTS)
    validation = [
        {
            "epoch": int(event["epoch"]),
            "loss": round(float(event["val"]["loss_epoch"]), 4),
            "accuracy": _by_step(event["val"], "full_acc_{}_epoch"),
            "conditional_accuracy": _by_step(event["val"], "cond_acc_{}_epoch"),
        }
        for event in events
        if "val" in event
    ]
    return {
        "steps": train[-1][0] + 1,
        "final_loss": round(sum(float(metrics["loss"]) for metrics in last) / len(last), 4),
        "final_accuracy": _by_step(last[-1], "full_acc_{}"),
        "loss_curve": [[step, round(float(metrics["loss"]), 4)] for step, metrics in train[::stride]],
        "validation": validation,
    }


def _by_step(metrics: Mapping[str, Any], pattern: str) -> list[float]:
    values: list[float] = []
    while (key := pattern.format(len(values))) in metrics:
        values.append(round(float(metrics[key]), 4))
    return values


class _Reporter:
    """Turns metric records into progress events, about one a second."""

    def __init__(self, progress: Progress, num_epochs: int) -> None:
        self._progress = progress
        self._num_epochs = num_epochs
        self._total_steps = 0
        self._validation_loss: float | None = None
        self._last = float("-inf")
        self.device: str | None = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        if "start" in event:
            self._total_steps = event["start"]["steps_per_epoch"] * self._num_epochs
            self.device = event["start"]["device"]
            return
        if "val" in event:
            self._validation_loss = round(float(event["val"]["loss_epoch"]), 4)
            return
        done = int(event["global_step"]) + 1
        now = time.monotonic()
        if now - self._last < PROGRESS_INTERVAL_S and done < self._total_steps:
            return
        self._last = now
        values: dict[str, float | int | str] = {
            "loss": round(float(event["train"]["loss"]), 4),
            "accuracy": round(float(event["train"].get("full_acc_0", 0.0)), 4),
            "epoch": int(event["epoch"]) + 1,
        }
        if self._validation_loss is not None:
            values["validation_loss"] = self._validation_loss
        self._progress(
            ProgressEvent(stage="training", done=done, total=max(done, self._total_steps), unit="steps", values=values)
        )


def _commit_checkpoint(
    stage: OpenStage, source: Path, recipe: Recipe, target: Path, num_samples: int
) -> tuple[ShardRef, ShardRef]:
    """Copy the final epoch to its sealed place; the place of the target on this machine stays behind."""
    config = json.loads((source / CONFIG_FILE).read_text("utf-8"))
    config["speculators_config"]["verifier"]["name_or_path"] = recipe.target.name
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    if str(target.resolve()) in text:
        raise TrainingError("the trainer wrote the target's folder into an unexpected place of config.json")

    def write_config(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return (
        stage.commit_shard(f"{CHECKPOINT_FOLDER}/{CONFIG_FILE}", write_config, num_samples=0),
        stage.commit_shard(
            f"{CHECKPOINT_FOLDER}/{WEIGHTS_FILE}", partial(copy_weights, source / WEIGHTS_FILE), num_samples=num_samples
        ),
    )
