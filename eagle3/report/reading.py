"""Reading a run directory as it is: whole, half done, paused or damaged.

Everything here is tolerant: what is missing is empty, what is unreadable becomes a sentence for people. Only names that
a manifest or a shard reference gives are trusted as data. Nothing is written.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import TypeAdapter, ValidationError

from eagle3.artifacts import RunDirectory, ShardRef, Stage, StageManifest, StageStatus, read_manifest
from eagle3.errors import ArtifactError, InputError
from eagle3.progress_log import LoggedEvent, read_progress
from eagle3.records import JsonObject

_SHARD_REF = TypeAdapter(ShardRef)

STAGE_OF_EVENT: Mapping[str, Stage] = {
    "prompts": Stage.PROMPTS,
    "generation": Stage.COMPLETIONS,
    "completions": Stage.COMPLETIONS,
    "reconstruction": Stage.TOKEN_SAMPLES,
    "audit": Stage.AUDIT,
    "corpus": Stage.CORPUS,
    "hidden_states": Stage.HIDDEN_STATES,
    "training": Stage.DRAFT,
    "draft": Stage.DRAFT,
    "evaluation": Stage.EVALUATION,
    "export": Stage.EXPORT,
    **{stage.value: stage for stage in Stage},
    **{stage.command: stage for stage in Stage},
}
"""Which stage a progress event speaks of: stages are known by folder, by command and by what they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """What is on disk of one stage."""

    stage: Stage
    manifest: StageManifest | None
    """Sealed or paused; None when there is none or it cannot be read."""
    problem: str
    """Why the manifest cannot be read; empty when it can, or when there is none."""
    refs: Sequence[ShardRef]
    """Files committed towards a stage that is not complete; empty for complete ones."""
    other_refs: int
    """Committed files left behind by other settings."""

    @property
    def stats(self) -> Mapping[str, Any]:
        """Figures of the manifest; empty without one."""
        return {} if self.manifest is None else self.manifest.stats

    @property
    def is_complete(self) -> bool:
        """Whether later stages may read it."""
        return self.manifest is not None and self.manifest.status is StageStatus.COMPLETE

    @property
    def shards(self) -> Sequence[ShardRef]:
        """Data files: those of the manifest when complete, else those committed so far."""
        found = self.manifest.shards if self.manifest is not None and self.is_complete else self.refs
        return [shard for shard in found if is_data_shard(shard.path)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Everything that reports read of one run."""

    name: str
    stages: Mapping[Stage, StageView]
    recipe: JsonObject
    """The recipe with its defaults; as written when no resolved copy is there; empty without either."""
    recipe_text: str
    events: Sequence[LoggedEvent]
    failures: Mapping[str, int]
    """Samples without an answer by reason."""
    dropped_prompts: Mapping[str, int]
    """Prompts dropped before spending by reason."""
    journal_bytes: int
    audit: JsonObject
    evaluation: JsonObject
    provenance: JsonObject
    """Of the latest attempt."""
    attempts: Sequence[JsonObject]
    """What each attempt wrote down at its end; empty for one that runs or was killed."""

    def stats(self, stage: Stage) -> Mapping[str, Any]:
        """Figures that a stage sealed; empty when it did not."""
        return self.stages[stage].stats

    def events_of(self, stage: Stage) -> Sequence[LoggedEvent]:
        """Progress of one stage, of all its parts."""
        return [entry for entry in self.events if STAGE_OF_EVENT.get(entry.event.stage) is stage]

    @property
    def generation_events(self) -> Sequence[LoggedEvent]:
        """Progress of generation as a whole: events with a label tell of one dataset only."""
        return [entry for entry in self.events_of(Stage.COMPLETIONS) if not entry.event.label]


def is_data_shard(path: str) -> bool:
    """Whether a file of a stage holds samples, as opposed to what is told about them."""
    name = path.rsplit("/", 1)[-1]
    return name.startswith(("shard-", "hs_"))


def read_run(run: RunDirectory) -> RunView:
    """Read what there is of a run.

    Raises:
        InputError: There is no such directory.
    """
    if not run.path.is_dir():
        raise InputError(
            f"run directory {run.path.name!r} does not exist. Check the path, or start it with 'eagle3 run'."
        )
    completions = run.stage_path(Stage.COMPLETIONS)
    recipe_text = _read_text(run.path / "recipe.yaml")
    stages = {stage: _read_stage(run, stage) for stage in Stage}
    attempts = sorted(path for path in run.path.glob("attempts/*") if path.name.isdigit())
    return RunView(
        name=run.path.resolve().name,
        stages=stages,
        recipe=_read_json(run.path / "recipe.resolved.json") or _read_yaml(recipe_text),
        recipe_text=recipe_text,
        events=read_progress(run.path / "progress.jsonl"),
        failures=_count_failures(completions / "failed.jsonl"),
        dropped_prompts=_sum_counts(
            at(entry, "dropped_by_reason") for entry in as_mapping(stages[Stage.PROMPTS].stats.get("datasets")).values()
        ),
        journal_bytes=sum(path.stat().st_size for path in completions.glob("*/journal-*.jsonl")),
        audit=_read_json(run.stage_path(Stage.AUDIT) / "report.json"),
        evaluation=_read_json(run.stage_path(Stage.EVALUATION) / "report.json"),
        provenance=_read_json(attempts[-1] / "provenance.json") if attempts else {},
        attempts=[_read_json(attempt / "made.json") for attempt in attempts],
    )


def _read_stage(run: RunDirectory, stage: Stage) -> StageView:
    path = run.stage_path(stage)
    manifest: StageManifest | None = None
    problem = ""
    try:
        manifest = read_manifest(path)
    except ArtifactError as exc:
        problem = str(exc)
    if manifest is not None and manifest.status is StageStatus.COMPLETE:
        return StageView(stage=stage, manifest=manifest, problem="", refs=(), other_refs=0)
    wanted = manifest.fingerprint if manifest is not None else None
    refs, others = _read_refs(path, wanted)
    return StageView(stage=stage, manifest=manifest, problem=problem, refs=refs, other_refs=others)


def _read_refs(path: Path, wanted: str | None) -> tuple[Sequence[ShardRef], int]:
    """Return the shards committed under `wanted` (the newest fingerprint when None) and how many others there are."""
    folder = path / ".shards"
    if not folder.is_dir():
        return (), 0
    found: list[tuple[float, str, ShardRef]] = []
    for reference in sorted(folder.rglob("*.json")):
        stored = _read_json(reference)
        try:
            shard = _SHARD_REF.validate_python(stored.get("shard"))
        except ValidationError:
            continue
        if (path / shard.path).is_file():
            found.append((reference.stat().st_mtime, str(stored.get("fingerprint")), shard))
    if not found:
        return (), 0
    fingerprint = wanted if wanted is not None else max(found, key=lambda item: item[0])[1]
    refs = [shard for _, made_by, shard in found if made_by == fingerprint]
    return refs, len(found) - len(refs)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> JsonObject:
    try:
        value: object = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return as_mapping(value)


def _read_yaml(text: str) -> JsonObject:
    try:
        return as_mapping(yaml.safe_load(text))
    except yaml.YAMLError:
        return {}


def _count_failures(path: Path) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for raw in _read_text(path).splitlines():
        try:
            entry = as_mapping(json.loads(raw))
        except ValueError:
            continue
        counts[str(entry.get("failure", "unknown"))] += 1
    return _most_first(counts)


def _sum_counts(parts: Iterable[object]) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for part in parts:
        for reason, count in as_mapping(part).items():
            counts[reason] += integer(count) or 0
    return _most_first(counts)


def _most_first(counts: Mapping[str, int]) -> Mapping[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def as_mapping(value: object) -> JsonObject:
    """Return a JSON object as it is, and anything else as an empty one."""
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def at(value: object, *path: str) -> Any:
    """Return what lies at a path of keys inside JSON, or None when it is not there."""
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = cast("Mapping[str, object]", value).get(key)
    return value


def integer(value: object) -> int | None:
    """Return a JSON number as an int, and anything else as None."""
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def number(value: object) -> float | None:
    """Return a JSON number, or a number written as text, as a finite float; anything else as None."""
    amount = dollars(value)
    return None if amount is None else float(amount)


def dollars(value: object) -> Decimal | None:
    """Return an amount, written as text or as a number, as a finite decimal; anything else as None."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        return None
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        return None
    return amount if amount.is_finite() else None
