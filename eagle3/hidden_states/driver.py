"""Stage 6: extract the target's hidden states for every row of the corpus.

The gates run on a spread of rows that are extracted first: a wiring fault ends the stage after seconds, not hours.
"""

import importlib.metadata
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.artifacts import RunDirectory, ShardRef, Stage, StageManifest, sha256_file, verify_shard
from eagle3.errors import CorruptShardError, GateError, MissingExtraError, TargetError
from eagle3.formats import CORPUS, corpus_loss_mask, hidden_states_name, read_rows
from eagle3.hidden_states.backend import Backend, plan_batches
from eagle3.hidden_states.contract import CaptureContract, checked_layer_ids
from eagle3.hidden_states.gates import GateSample, run_gates
from eagle3.hidden_states.store import HiddenStateStore, estimate_bytes, require_disk_space
from eagle3.hidden_states.transformers_backend import TransformersBackend
from eagle3.progress import Progress, ProgressEvent, no_progress
from eagle3.recipe import Recipe
from eagle3.records import canonical_json, sha256_text
from eagle3.tokens.grammar import grammar_of
from eagle3.tokens.tokenizer import load_tokenizer

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


def extract_hidden_states(
    recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress
) -> StageManifest:
    """Compute, store and check the hidden states of every corpus row.

    Files that an earlier, interrupted run left whole are kept.

    Args:
        recipe: Section `hidden_states` decides.
        run: Its corpus must be sealed.
        target: Hugging Face directory of the target.
        progress: Told of every batch, in tokens.

    Returns:
        The sealed manifest: one file per row, train rows first; `stats` holds contract, gate figures, counts and speed.

    Raises:
        GateError: The states are not what their contract says, or the corpus holds ids that the target does not know.
        RecipeError: The layer ids do not fit the target.
        ConfigurationError: The disk is too small.
        TargetError: The target cannot be loaded.
        MissingExtraError: torch or transformers is not installed.
        StageMissingError: The corpus is not sealed.
        CorruptShardError: A corpus file changed.
    """
    settings = recipe.hidden_states
    corpus = run.sealed(Stage.CORPUS)
    shape = read_target_shape(target)
    tokenizer_sha256 = load_tokenizer(target, grammar_of(recipe)).digest
    weights_sha256 = digest_weights(target)
    stage = run.open_stage(
        Stage.HIDDEN_STATES,
        {"hidden_states": settings.identity()},
        {Stage.CORPUS.value: corpus.digest, "target-weights": weights_sha256, "target-tokenizer": tokenizer_sha256},
    )
    if stage.manifest is not None:
        return stage.manifest
    contract = CaptureContract(
        target=recipe.target.name,
        layer_ids=checked_layer_ids(settings.layer_ids, shape.num_layers),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        dtype=settings.dtype,
        tokenizer_sha256=tokenizer_sha256,
        weights_sha256=weights_sha256,
        transformers_version=_transformers_version(),
    )
    rows = read_corpus(run, corpus)
    check_ids(rows, shape.vocab_size)
    store = HiddenStateStore(stage.path, contract)
    shards = find_existing(store, rows)
    resumed = len(shards)
    missing = [row for row in range(len(rows)) if row not in shards]
    needed_bytes = estimate_bytes(contract, [len(rows[row].input_ids) for row in missing])
    require_disk_space(stage.path, needed_bytes, settings.disk_reserve_bytes)
    backend = TransformersBackend(target, contract.layer_ids, settings.dtype, settings.num_threads)
    extraction = _Extraction(rows, store, backend, settings.batch_tokens, shards, progress)
    probes = gate_rows(len(rows), settings.gate_samples)
    extraction.extract(probes)
    gates = run_gates(
        [_gate_sample(store, row, rows[row]) for row in probes], contract, backend, settings.min_target_agreement
    )
    extraction.extract(range(len(rows)))
    ordered = [shards[row] for row in range(len(rows))]
    stats = {
        "contract": asdict(contract),
        "gates": gates,
        "samples": len(ordered),
        "tokens": sum(shard.num_tokens for shard in ordered),
        "bytes": sum(shard.size_bytes for shard in ordered),
        "tokens_per_s": round(extraction.tokens_per_s, 1),
        "resumed_samples": resumed,
    }
    return stage.seal(ordered, stats)


class _Extraction:
    """The rows under way: what is done, and how fast it goes."""

    def __init__(
        self,
        rows: Sequence[CorpusRow],
        store: HiddenStateStore,
        backend: Backend,
        batch_tokens: int,
        shards: dict[int, ShardRef],
        progress: Progress,
    ) -> None:
        """Start from `shards`, the rows already there; finished rows are added to it."""
        self._rows = rows
        self._store = store
        self._backend = backend
        self._batch_tokens = batch_tokens
        self._shards = shards
        self._progress = progress
        self._total = sum(len(row.input_ids) for row in rows)
        self._done = sum(shard.num_tokens for shard in shards.values())
        self._computed = 0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed and committed per second of this run; 0 when all were there."""
        return self._computed / self._seconds if self._seconds else 0.0

    def extract(self, wanted: Sequence[int]) -> None:
        """Compute and commit those of the wanted rows that are not there yet, batch by batch.

        One batch is written while the next is computed, because a commit mostly waits for the disk. All are durable
        when this returns.
        """
        missing = [row for row in wanted if row not in self._shards]
        self._report()
        started, before = time.perf_counter(), self._seconds
        pending: tuple[list[int], Future[list[ShardRef]]] | None = None
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hidden-states-writer") as writer:
            for batch in plan_batches([len(self._rows[row].input_ids) for row in missing], self._batch_tokens):
                rows = [missing[index] for index in batch]
                sequences = [self._rows[row].input_ids for row in rows]
                states = self._backend.capture(sequences)
                if pending is not None:
                    self._finish(*pending)
                pending = (rows, writer.submit(self._store.commit, rows, sequences, states))
                self._seconds = before + time.perf_counter() - started
            if pending is not None:
                self._finish(*pending)
                self._seconds = before + time.perf_counter() - started
        self._report()

    def _finish(self, rows: Sequence[int], commit: Future[list[ShardRef]]) -> None:
        """Wait for a commit and count its rows."""
        for row, shard in zip(rows, commit.result(), strict=True):
            self._shards[row] = shard
            self._done += shard.num_tokens
            self._computed += shard.num_tokens
        self._report()

    def _report(self) -> None:
        self._progress(
            ProgressEvent(
                stage="hidden_states",
                done=self._done,
                total=self._total,
                unit="tokens",
                values={"tokens_per_s": round(self.tokens_per_s)},
            )
        )


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


def find_existing(store: HiddenStateStore, rows: Sequence[CorpusRow]) -> dict[int, ShardRef]:
    """Return the rows whose files an earlier run left whole."""
    if not store.directory.is_dir():
        return {}
    found = ((row, store.existing(row, entry.input_ids)) for row, entry in enumerate(rows))
    return {row: shard for row, shard in found if shard is not None}


def gate_rows(num_rows: int, num_samples: int) -> list[int]:
    """Return the rows the gates look at: evenly spread, ascending, distinct."""
    wanted = min(num_rows, num_samples)
    return [index * num_rows // wanted for index in range(wanted)]


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
        TargetError: There are no safetensors files.
    """
    weights = sorted(target.glob("*.safetensors"))
    if not weights:
        raise TargetError(
            f"target {target.name!r} has no '*.safetensors' file: there are no weights to run. Complete the directory."
        )
    files = [target / "config.json", *weights]
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


def _gate_sample(store: HiddenStateStore, row: int, entry: CorpusRow) -> GateSample:
    return GateSample(
        row=row, input_ids=entry.input_ids, loss_mask=entry.loss_mask, hidden_TLH=store.read(row).hidden_TLH
    )


def _transformers_version() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as exc:
        raise MissingExtraError(
            "extracting hidden states needs transformers, which is not installed. "
            "Install the train extra: pip install 'eagle3-pipeline[train]'."
        ) from exc
