"""The run directory: where files live, how they are committed, sealed and checked again.

Layout, rules and reasons: docs/architecture.md, "Files of a run". In short: a file appears under its final name only
when it is complete; a stage exists only when its `manifest.json`, written last, exists; readers take file names from
manifests, never from the folder.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from eagle3.drift import Origin, drift_message
from eagle3.errors import ArtifactError, CorruptShardError, StageDriftError, StageMissingError
from eagle3.locks import held, is_held
from eagle3.records import canonical_json, sha256_text

MANIFEST_NAME = "manifest.json"
TEMPORARY_SUFFIX = ".tmp"
SCHEMA_VERSION = 1
"""Version of the run directory's own files. Part of every fingerprint."""


class Stage(StrEnum):
    """The stages in the order in which data passes them; the value is the folder name."""

    PROMPTS = "1-prompts"
    COMPLETIONS = "2-completions"
    TOKEN_SAMPLES = "3-token-samples"
    AUDIT = "4-audit"
    CORPUS = "5-corpus"
    HIDDEN_STATES = "6-hidden-states"
    DRAFT = "7-draft"
    EVALUATION = "8-evaluation"
    EXPORT = "9-export"

    @property
    def command(self) -> str:
        """The `eagle3` sub-command that makes this stage."""
        return {
            Stage.PROMPTS: "prompts",
            Stage.COMPLETIONS: "generate",
            Stage.TOKEN_SAMPLES: "reconstruct",
            Stage.AUDIT: "audit",
            Stage.CORPUS: "corpus",
            Stage.HIDDEN_STATES: "extract",
            Stage.DRAFT: "train",
            Stage.EVALUATION: "evaluate",
            Stage.EXPORT: "export",
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRef:
    """One committed file of a stage."""

    path: str
    """Relative to the stage folder, with forward slashes."""
    sha256: str
    size_bytes: int
    num_samples: int
    num_tokens: int = 0
    stats: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Small JSON figures; not part of the stage's digest."""


class StageStatus(StrEnum):
    """Whether later stages may read a stage."""

    COMPLETE = "complete"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageManifest:
    """What a stage sealed. Written last, so its presence means that everything it lists is there."""

    stage: Stage
    schema_version: int
    fingerprint: str
    """sha256 over `identity`, `inputs` and the schema version."""
    identity: Mapping[str, Any]
    """The recipe values that shaped the bytes."""
    inputs: Mapping[str, str]
    """Digest of each thing read: earlier stages by folder name, files by role."""
    shards: Sequence[ShardRef]
    stats: Mapping[str, Any]
    status: StageStatus
    created_at: str
    """UTC, ISO 8601. Not part of the digest."""

    @property
    def digest(self) -> str:
        """sha256 over fingerprint and shard contents: equal digests mean equal bytes."""
        shards = [[shard.path, shard.sha256, shard.num_samples] for shard in self.shards]
        return sha256_text(canonical_json([self.stage, self.fingerprint, shards]))


_MANIFEST = TypeAdapter(StageManifest)
_SHARD_REF = TypeAdapter(ShardRef)


def fingerprint_of(identity: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Return the sha256 that names one combination of settings and inputs."""
    return sha256_text(canonical_json([SCHEMA_VERSION, identity, inputs]))


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(directory: Path) -> None:
    """Make renames inside `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def committed_file(path: Path) -> Generator[Path]:
    """Yield a temporary path beside `path`; on success it is synced and renamed to `path`.

    A crash at any point leaves either the old file or the new one, and perhaps a temporary file that
    `OpenStage` sweeps.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX, dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def commit_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that it is there in full or not at all."""
    with committed_file(path) as temporary:
        temporary.write_bytes(data)


def commit_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically."""
    commit_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n").encode())


class OpenStage:
    """One stage folder, opened for a given recipe and given inputs.

    Opening sweeps temporary files, unless other processes may be writing there, compares an existing manifest with what
    the recipe asks for, and never writes.

    Attributes:
        path: The stage folder.
        fingerprint: Name of this combination of settings and inputs.
        manifest: The sealed manifest when the stage is complete, else None.
    """

    def __init__(
        self,
        path: Path,
        stage: Stage,
        identity: Mapping[str, Any],
        inputs: Mapping[str, str],
        *,
        is_shared: bool = False,
    ) -> None:
        """Open the stage folder at `path`; when it `is_shared`, temporary files belong to others and stay.

        Raises:
            StageDriftError: It was sealed from other settings or other inputs.
            ArtifactError: Its manifest cannot be read.
        """
        self.path = path
        self.stage = stage
        self.identity = json.loads(canonical_json(identity))
        self.inputs = dict(inputs)
        self.fingerprint = fingerprint_of(self.identity, self.inputs)
        if path.is_dir() and not is_shared:
            for leftover in path.rglob(f".*{TEMPORARY_SUFFIX}"):
                leftover.unlink(missing_ok=True)
        found = read_manifest(path)
        if found is not None and found.fingerprint != self.fingerprint:
            raise StageDriftError(_drift_message(self, found))
        self.manifest = found if found is not None and found.status is StageStatus.COMPLETE else None

    def file(self, relative: str) -> Path:
        """Return the absolute path of a file of this stage."""
        return self.path / relative

    def commit_shard(
        self,
        relative: str,
        write: Callable[[Path], None],
        *,
        num_samples: int,
        num_tokens: int = 0,
        stats: Mapping[str, Any] | None = None,
    ) -> ShardRef:
        """Let `write` fill a temporary file, commit it as `relative`, and remember it for `existing_shard`."""
        target = self.file(relative)
        with committed_file(target) as temporary:
            write(temporary)
            digest = sha256_file(temporary)
            size_bytes = temporary.stat().st_size
        shard = ShardRef(
            path=relative,
            sha256=digest,
            size_bytes=size_bytes,
            num_samples=num_samples,
            num_tokens=num_tokens,
            stats=dict(stats or {}),
        )
        commit_json(self._ref_path(relative), {"fingerprint": self.fingerprint, "shard": asdict(shard)})
        return shard

    def existing_shard(self, relative: str) -> ShardRef | None:
        """Return the shard committed earlier under this name for the same settings, or None when it must be made.

        A file that changed since, or that was made from other settings, counts as not there.
        """
        reference = self._ref_path(relative)
        if not reference.is_file() or not self.file(relative).is_file():
            return None
        stored = json.loads(reference.read_bytes())
        if stored.get("fingerprint") != self.fingerprint:
            return None
        shard = _SHARD_REF.validate_python(stored["shard"])
        return shard if sha256_file(self.file(relative)) == shard.sha256 else None

    def seal(
        self,
        shards: Sequence[ShardRef],
        stats: Mapping[str, Any],
        status: StageStatus = StageStatus.COMPLETE,
    ) -> StageManifest:
        """Write the manifest. Everything it lists must have been committed."""
        manifest = StageManifest(
            stage=self.stage,
            schema_version=SCHEMA_VERSION,
            fingerprint=self.fingerprint,
            identity=self.identity,
            inputs=self.inputs,
            shards=tuple(shards),
            stats=dict(stats),
            status=status,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        commit_json(self.path / MANIFEST_NAME, _MANIFEST.dump_python(manifest, mode="json"))
        if status is StageStatus.COMPLETE:
            self.manifest = manifest
        return manifest

    def _ref_path(self, relative: str) -> Path:
        return self.path / ".shards" / f"{relative}.json"


def read_manifest(stage_path: Path) -> StageManifest | None:
    """Return the manifest of a stage folder, or None when it was never sealed.

    Raises:
        ArtifactError: The manifest exists but cannot be read.
    """
    path = stage_path / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        return _MANIFEST.validate_json(path.read_bytes())
    except ValidationError as exc:
        message = (
            f"manifest of stage {stage_path.name!r} cannot be read ({exc.error_count()} problems): it was edited or "
            f"written by another version. Delete the folder {stage_path.name!r} and run again."
        )
        raise ArtifactError(message) from exc


def verify_shard(stage_path: Path, shard: ShardRef) -> Path:
    """Return the absolute path of a sealed file after checking that it is what was sealed.

    Raises:
        CorruptShardError: It is missing, or its bytes changed.
    """
    path = stage_path / shard.path
    name = f"{stage_path.name}/{shard.path}"
    command = Stage(stage_path.name).command if stage_path.name in set(Stage) else "run"
    advice = f"Restore the file, or delete the folder {stage_path.name!r} and run 'eagle3 {command}' again."
    if not path.is_file():
        raise CorruptShardError(f"shard {name!r} is missing although its manifest lists it. {advice}")
    found = sha256_file(path)
    if found != shard.sha256:
        message = (
            f"shard {name!r} has sha256 {found[:12]}…, its manifest says {shard.sha256[:12]}…: "
            f"it changed after it was sealed. {advice}"
        )
        raise CorruptShardError(message)
    return path


class RunDirectory:
    """One run on disk: the place of every stage, and the lock of its single writer."""

    def __init__(self, path: Path) -> None:
        """Name a run directory; nothing is created yet."""
        self.path = path

    @property
    def summary_path(self) -> Path:
        """Where `summary.json` goes."""
        return self.path / "summary.json"

    @property
    def report_path(self) -> Path:
        """Where the self-contained HTML report goes."""
        return self.path / "report.html"

    def stage_path(self, stage: Stage) -> Path:
        """Return the folder of a stage, whether it exists or not."""
        return self.path / stage.value

    def open_stage(
        self, stage: Stage, identity: Mapping[str, Any], inputs: Mapping[str, str], *, is_shared: bool = False
    ) -> OpenStage:
        """Open a stage for writing or reuse; see `OpenStage`."""
        return OpenStage(self.stage_path(stage), stage, identity, inputs, is_shared=is_shared)

    def sealed(self, stage: Stage) -> StageManifest:
        """Return the manifest of a complete stage.

        Raises:
            StageMissingError: The stage was not sealed, or it only paused.
        """
        manifest = read_manifest(self.stage_path(stage))
        if manifest is None or manifest.status is not StageStatus.COMPLETE:
            found = "not started" if manifest is None else manifest.status.value
            message = f"stage {stage.value!r} must be complete first, but it is {found}. Run 'eagle3 {stage.command}'."
            raise StageMissingError(message)
        return manifest

    def shard_paths(self, manifest: StageManifest) -> list[Path]:
        """Return the verified paths of all files of a sealed stage, in manifest order.

        Raises:
            CorruptShardError: A file is missing or changed.
        """
        return [verify_shard(self.stage_path(manifest.stage), shard) for shard in manifest.shards]

    def discard(self, stages: Sequence[Stage]) -> None:
        """Delete stage folders so that they are made again. Answers already paid for are never deleted this way.

        Raises:
            ArtifactError: `stages` names the completions.
        """
        if Stage.COMPLETIONS in stages or Stage.PROMPTS in stages:
            message = (
                f"will not delete {Stage.COMPLETIONS.value!r}: it holds answers that were paid for. Start a run under "
                "another name, or delete the folder by hand."
            )
            raise ArtifactError(message)
        for stage in stages:
            shutil.rmtree(self.stage_path(stage), ignore_errors=True)

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the run directory: one writer at a time. The lock dies with its process.

        Raises:
            RunLockedError: Another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with held(self._lock_path, f"run directory {self.path.name!r}"):
            yield

    def is_locked(self) -> bool:
        """Tell whether a living process works here."""
        return is_held(self._lock_path)

    @property
    def _lock_path(self) -> Path:
        return self.path / ".lock"

    def begin_attempt(self, provenance: Mapping[str, Any]) -> Path:
        """Create `attempts/NNNN/` with `provenance.json` and return the folder."""
        attempts = self.path / "attempts"
        attempts.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(entry.name) for entry in attempts.iterdir() if entry.name.isdigit()), default=0)
        folder = attempts / f"{number:04d}"
        folder.mkdir()
        commit_json(folder / "provenance.json", provenance)
        return folder

    def point_latest(self) -> None:
        """Make the sibling link `latest` point at this run."""
        link = self.path.parent / "latest"
        temporary = self.path.parent / f".latest.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.path.name, target_is_directory=True)
        temporary.replace(link)


def _drift_message(stage: OpenStage, found: StageManifest) -> str:
    if stage.stage in (Stage.PROMPTS, Stage.COMPLETIONS):
        redo = "delete the folder by hand if you accept to pay for its answers again"
    else:
        redo = f"run again with '--redo {stage.stage.command}' to make this stage and all later ones anew"
    wanted = Origin(identity=stage.identity, inputs=stage.inputs, schema_version=SCHEMA_VERSION)
    sealed = Origin(identity=found.identity, inputs=found.inputs, schema_version=found.schema_version)
    return drift_message(stage.stage.value, wanted, sealed, redo)
