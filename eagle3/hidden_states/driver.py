"""Stage 6: extract the target's hidden states for every row of the corpus, alone or in groups on several machines.

The gates run on a spread of rows that are computed first: a wiring fault ends the stage after seconds, not hours. Every
machine that takes part passes them before it keeps anything.
"""

import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.artifacts import OpenStage, RunDirectory, ShardRef, Stage, StageManifest
from eagle3.errors import MissingExtraError
from eagle3.file_system import require_leader
from eagle3.hidden_states.backend import Backend
from eagle3.hidden_states.contract import CaptureContract, checked_layer_ids
from eagle3.hidden_states.gates import GateSample, run_gates
from eagle3.hidden_states.groups import Division, GroupRecord, require_no_other_division
from eagle3.hidden_states.plan import Batch, WorkPlan, plan_work
from eagle3.hidden_states.reading import CorpusRow, check_ids, digest_weights, read_corpus, read_target_shape
from eagle3.hidden_states.store import HiddenStateStore, estimate_bytes, require_disk_space
from eagle3.hidden_states.transformers_backend import TransformersBackend
from eagle3.progress import Progress, ProgressEvent, no_progress
from eagle3.recipe import HiddenStates, Recipe
from eagle3.records import canonical_json, sha256_text
from eagle3.tokens.grammar import grammar_of
from eagle3.tokens.tokenizer import load_tokenizer

WEIGHTS, TOKENIZER = "target-weights", "target-tokenizer"
"""Names of the stage's inputs beside the corpus."""


def extract_hidden_states(
    recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress
) -> StageManifest:
    """Compute, store and check the hidden states of every corpus row.

    Files that an earlier, interrupted run left whole are kept, and so is every group that another machine finished.

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
        RunLockedError: Another process extracts some of the rows.
    """
    stage = _open_stage(recipe, run, target)
    if stage.manifest is not None:
        return stage.manifest
    work = _plan(stage, recipe, run, target)
    records = {number: work.division.record(number, work.plan) for number in work.division.numbers}
    made = [record for record in records.values() if record is not None]
    left = [number for number, record in records.items() if record is None]
    if left:
        with work.division.holding(left):
            made.append(_extract(work, left, progress, label=""))
    return _seal(work, made)


def extract_group(
    recipe: Recipe, run: RunDirectory, target: Path, number: int, leader_id: str, progress: Progress = no_progress
) -> GroupRecord:
    """Compute, store and check one group of `hidden_states.num_groups`, called by a leader; the caller holds the group.

    Several machines may do so at the same time. A group that is done already is returned as it is.

    Raises:
        ConfigurationError: This machine does not share the storage, the locks or the versions of the leader.
        Eagle3Error: As for `extract_hidden_states`.
    """
    work = _plan(_open_stage(recipe, run, target), recipe, run, target)
    require_leader(work.division.folder, leader_id, work.claim)
    found = work.division.record(number, work.plan)
    if found is not None:
        return found
    made = _extract(work, [number], progress, label=f"group {number + 1} of {work.division.count}")
    work.division.commit(number, made)
    return made


def claim_of_groups(recipe: Recipe, run: RunDirectory, target: Path) -> Mapping[str, str] | None:
    """Return what every machine must agree on before it extracts a group; None when the stage is sealed.

    Key `plan` names the records of the groups.

    Raises:
        Eagle3Error: As for `extract_hidden_states`.
    """
    stage = _open_stage(recipe, run, target)
    return None if stage.manifest is not None else _plan(stage, recipe, run, target).claim


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extraction:
    """All that decides which files are made, and how."""

    settings: HiddenStates
    stage: OpenStage
    target: Path
    contract: CaptureContract
    rows: Sequence[CorpusRow]
    store: HiddenStateStore
    batches: WorkPlan
    division: Division

    @property
    def claim(self) -> Mapping[str, str]:
        """What machines that share the work must agree on; `plan` sums up the rest, which is there for people."""
        parts = [self.batches.probes, self.batches.batches, self.division.count, self.contract.to_json()]
        return {
            "stage settings and inputs": self.stage.fingerprint,
            "number of groups": str(self.division.count),
            "transformers": self.contract.transformers_version,
            "plan": sha256_text(canonical_json([self.stage.fingerprint, *parts])),
        }

    @property
    def plan(self) -> str:
        """Digest of everything that decides which files are made."""
        return self.claim["plan"]


def _open_stage(recipe: Recipe, run: RunDirectory, target: Path) -> OpenStage:
    settings = recipe.hidden_states
    require_no_other_division(run.stage_path(Stage.HIDDEN_STATES), settings.num_groups)
    inputs = {
        Stage.CORPUS.value: run.sealed(Stage.CORPUS).digest,
        WEIGHTS: digest_weights(target),
        TOKENIZER: load_tokenizer(target, grammar_of(recipe)).digest,
    }
    identity = {"hidden_states": settings.identity()}
    return run.open_stage(Stage.HIDDEN_STATES, identity, inputs, is_shared=settings.num_groups > 1)


def _plan(stage: OpenStage, recipe: Recipe, run: RunDirectory, target: Path) -> _Extraction:
    settings = recipe.hidden_states
    shape = read_target_shape(target)
    contract = CaptureContract(
        target=recipe.target.name,
        layer_ids=checked_layer_ids(settings.layer_ids, shape.num_layers),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        dtype=settings.dtype,
        tokenizer_sha256=stage.inputs[TOKENIZER],
        weights_sha256=stage.inputs[WEIGHTS],
        transformers_version=_transformers_version(),
    )
    rows = read_corpus(run, run.sealed(Stage.CORPUS))
    check_ids(rows, shape.vocab_size)
    return _Extraction(
        settings=settings,
        stage=stage,
        target=target,
        contract=contract,
        rows=rows,
        store=HiddenStateStore(stage.path, contract),
        batches=plan_work([len(row.input_ids) for row in rows], settings.batch_tokens, settings.gate_samples),
        division=Division(stage.path, settings.num_groups),
    )


def _extract(work: _Extraction, groups: Sequence[int], progress: Progress, label: str) -> GroupRecord:
    """Make the files of some groups that are not there yet."""
    batches = [batch for number in groups for batch in work.batches.group(number, work.division.count)]
    rows = [row for batch in batches for row in batch]
    if not rows:
        return GroupRecord(plan=work.plan, shards=(), gates={}, computed_tokens=0, seconds=0.0, resumed_samples=0)
    shards = find_existing(work.store, work.rows, rows)
    resumed = len(shards)
    missing = [len(work.rows[row].input_ids) for row in rows if row not in shards]
    settings, contract = work.settings, work.contract
    require_disk_space(work.stage.path, estimate_bytes(contract, missing), settings.disk_reserve_bytes)
    backend = TransformersBackend(work.target, contract.layer_ids, settings.dtype, settings.num_threads)
    total = sum(len(work.rows[row].input_ids) for row in rows)

    def report(done: int, tokens_per_s: float) -> None:
        progress(_event(label, done, total, tokens_per_s))

    worker = _Worker(work.rows, work.store, backend, shards, report)
    if 0 in groups:
        worker.extract(work.batches.probes)
    gates = run_gates(worker.gate_samples(work.batches.probes), contract, backend, settings.min_target_agreement)
    worker.extract(batches)
    return GroupRecord(
        plan=work.plan,
        shards=tuple(shards[row] for row in sorted(shards)),
        gates=gates,
        computed_tokens=worker.computed_tokens,
        seconds=worker.seconds,
        resumed_samples=resumed,
    )


def _seal(work: _Extraction, made: Sequence[GroupRecord]) -> StageManifest:
    shards = {shard.path: shard for record in made for shard in record.shards}
    ordered = [shards[work.store.path(row).name] for row in range(len(work.rows))]
    seconds = sum(record.seconds for record in made)
    stats = {
        "contract": asdict(work.contract),
        "gates": next(record.gates for record in made if record.gates),
        "samples": len(ordered),
        "tokens": sum(shard.num_tokens for shard in ordered),
        "bytes": sum(shard.size_bytes for shard in ordered),
        "tokens_per_s": round(sum(record.computed_tokens for record in made) / seconds, 1) if seconds else 0.0,
        "resumed_samples": sum(record.resumed_samples for record in made),
    }
    manifest = work.stage.seal(ordered, stats)
    work.division.forget()
    return manifest


class _Worker:
    """The rows under way in this process: what is done, and how fast it goes."""

    def __init__(
        self,
        rows: Sequence[CorpusRow],
        store: HiddenStateStore,
        backend: Backend,
        shards: dict[int, ShardRef],
        report: Callable[[int, float], None],
    ) -> None:
        """Start from `shards`, the rows already there; finished rows are added to it.

        Args:
            rows: The whole corpus.
            store: Where the files go.
            backend: Computes them.
            shards: By row.
            report: Told of tokens done and tokens per second after every batch.
        """
        self._rows = rows
        self._store = store
        self._backend = backend
        self._shards = shards
        self._report = report
        self._done = sum(shard.num_tokens for shard in shards.values())
        self.computed_tokens = 0
        self.seconds = 0.0

    def extract(self, batches: Sequence[Batch]) -> None:
        """Compute every batch of which a row is missing, and commit the missing rows.

        One batch is written while the next is computed, because a commit mostly waits for the disk. All are durable
        when this returns.
        """
        self._tell()
        started, before = time.perf_counter(), self.seconds
        pending: tuple[list[int], Future[list[ShardRef]]] | None = None
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="hidden-states-writer") as writer:
            for batch in batches:
                missing = [row for row in batch if row not in self._shards]
                if not missing:
                    continue
                states = dict(zip(batch, self._capture(batch), strict=True))
                if pending is not None:
                    self._finish(*pending)
                sequences = [self._rows[row].input_ids for row in missing]
                kept = [states[row] for row in missing]
                pending = (missing, writer.submit(self._store.commit, missing, sequences, kept))
                self.seconds = before + time.perf_counter() - started
            if pending is not None:
                self._finish(*pending)
                self.seconds = before + time.perf_counter() - started
        self._tell()

    def gate_samples(self, batches: Sequence[Batch]) -> list[GateSample]:
        """Return the rows of some batches as the gates see them: read back when they lie here, else computed."""
        samples: list[GateSample] = []
        for batch in batches:
            are_here = all(row in self._shards for row in batch)
            states = [self._store.read(row).hidden_TLH for row in batch] if are_here else self._capture(batch)
            for row, hidden_TLH in zip(batch, states, strict=True):  # noqa: N806
                ids, mask = self._rows[row].input_ids, self._rows[row].loss_mask
                samples.append(GateSample(row=row, input_ids=ids, loss_mask=mask, hidden_TLH=hidden_TLH))
        return sorted(samples, key=lambda sample: sample.row)

    def _capture(self, batch: Batch) -> list[Any]:
        return self._backend.capture([self._rows[row].input_ids for row in batch])

    def _finish(self, rows: Sequence[int], commit: Future[list[ShardRef]]) -> None:
        """Wait for a commit and count its rows."""
        for row, shard in zip(rows, commit.result(), strict=True):
            self._shards[row] = shard
            self._done += shard.num_tokens
            self.computed_tokens += shard.num_tokens
        self._tell()

    def _tell(self) -> None:
        self._report(self._done, self.computed_tokens / self.seconds if self.seconds else 0.0)


def find_existing(store: HiddenStateStore, rows: Sequence[CorpusRow], wanted: Sequence[int]) -> dict[int, ShardRef]:
    """Return those of the wanted rows whose files an earlier run left whole."""
    found = ((row, store.existing(row, rows[row].input_ids)) for row in wanted)
    return {row: shard for row, shard in found if shard is not None}


def _event(label: str, done: int, total: int, tokens_per_s: float) -> ProgressEvent:
    return ProgressEvent(
        stage="hidden_states",
        label=label,
        done=done,
        total=total,
        unit="tokens",
        values={"tokens_per_s": round(tokens_per_s)},
    )


def _transformers_version() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as exc:
        raise MissingExtraError(
            "extracting hidden states needs transformers, which is not installed. "
            "Install the train extra: pip install 'eagle3-pipeline[train]'."
        ) from exc
