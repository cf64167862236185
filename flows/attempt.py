"""One attempt at a run: lock, provenance and what it made."""

import json
import platform
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from eagle3.artifacts import RunDirectory, Stage, commit_bytes, commit_json, read_manifest
from eagle3.errors import PausedError, RunLockedError
from eagle3.file_system import check_file_system
from eagle3.stages import from_stage_on, stage_of_command
from tasks.credits import is_probed
from tasks.job import Job

MADE_NAME = "made.json"
LONGEST_PROBE_S = 600.0
"""The credits watcher holds a run's lock while it asks one request for it."""


class Made:
    """What one attempt found and made."""

    def __init__(self, job: Job) -> None:
        """Remember what is there before the first step."""
        self._job = job
        self._spent_before = self._spent()
        self.stages: list[str] = []
        self.wall_s: dict[str, float] = {}

    @contextmanager
    def watching(self, stage: Stage) -> Generator[None]:
        """Note whether `stage` is made in the block, and how long that takes."""
        before = read_manifest(self._job.run.stage_path(stage))
        started = time.monotonic()
        yield
        after = read_manifest(self._job.run.stage_path(stage))
        if after is not None and (before is None or before.created_at != after.created_at or before != after):
            self.stages.append(stage.command)
            self.wall_s[stage.command] = round(time.monotonic() - started, 1)

    def result(self) -> dict[str, Any]:
        """Return what the flow run answers: small JSON."""
        return {
            "run": self._job.recipe.run_name,
            "stages_made": self.stages,
            "spent_now_usd": f"{self._spent() - self._spent_before:f}",
            "wall_s": self.wall_s,
        }

    def _spent(self) -> Decimal:
        manifest = read_manifest(self._job.run.stage_path(Stage.COMPLETIONS))
        return Decimal(str(manifest.stats.get("spent_usd", 0))) if manifest else Decimal(0)


@contextmanager
def attempt(job: Job, redo: str | None) -> Generator[Made]:
    """Hold the run directory for one attempt and write down what it ran with.

    Raises:
        RecipeError: The recipe is not valid; nothing was written.
        ConfigurationError: The file system does not keep the promises that runs need.
        RunLockedError: Another process works in the run directory.
    """
    recipe, run = job.recipe, job.run
    check_file_system(run.path.parent)
    with _locked(run):
        if redo is not None and not _was_begun(run):
            run.discard(from_stage_on(stage_of_command(redo)))
        commit_bytes(run.path / "recipe.yaml", Path(job.recipe_path).read_bytes())
        commit_json(run.path / "recipe.resolved.json", recipe.model_dump(mode="json"))
        folder = run.begin_attempt(_provenance(job))
        run.point_latest()
        made = Made(job)
        paused: str | None = None
        try:
            yield made
        except PausedError as exc:
            paused = str(exc)
            raise
        finally:
            commit_json(folder / MADE_NAME, {**made.result(), "paused": paused})


@contextmanager
def _locked(run: RunDirectory) -> Generator[None]:
    """Hold the run directory; wait for the credits watcher, which leaves it soon, and for nobody else."""
    deadline = time.monotonic() + LONGEST_PROBE_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(run.locked())
                break
            except RunLockedError:
                if not is_probed(run) or time.monotonic() > deadline:
                    raise
                time.sleep(1)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One attempt as the run directory remembers it."""

    flow_run_id: str | None
    has_ended: bool
    """False for one that works, and for one whose process died."""


def attempts_of(run: RunDirectory) -> list[AttemptRecord]:
    """Return the attempts at a run, oldest first."""
    return [
        AttemptRecord(
            flow_run_id=json.loads(path.read_bytes()).get("flow_run_id"), has_ended=(path.parent / MADE_NAME).is_file()
        )
        for path in sorted((run.path / "attempts").glob("*/provenance.json"))
    ]


def _was_begun(run: RunDirectory) -> bool:
    """Tell whether this flow run made an attempt already, so that a resumed run does not throw its own work away."""
    return bool(flow_run.id) and any(one.flow_run_id == flow_run.id for one in attempts_of(run))


def _provenance(job: Job) -> dict[str, Any]:
    packages = ("eagle3-pipeline", "prefect", "httpx", "pyarrow", "tokenizers", "torch", "transformers", "speculators")
    return {
        "flow_run_id": flow_run.id,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "run_fingerprint": job.recipe.run_fingerprint,
        "overrides": list(job.overrides),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "command": Path(sys.argv[0]).name,
        "packages": {name: _version_of(name) for name in packages},
    }


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except ModuleNotFoundError:
        return None
