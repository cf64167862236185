"""One attempt at a run: lock, provenance, what it made, and how a pause is told to Prefect."""

import platform
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed, Paused

from eagle3.artifacts import Stage, commit_bytes, commit_json, read_manifest
from eagle3.errors import CreditsExhaustedError, PausedError, StoppedError
from eagle3.stages import from_stage_on, stage_of_command
from tasks.job import Job

PAUSE_TIMEOUT_S = 30 * 24 * 3600
"""A run waits a month for a top-up before Prefect gives it up."""


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
            "spent_now_usd": str(self._spent() - self._spent_before),
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
        RunLockedError: Another process works in the run directory.
    """
    recipe, run = job.recipe, job.run
    with run.locked():
        if redo is not None:
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
            commit_json(folder / "made.json", {**made.result(), "paused": paused})


def paused_state(error: PausedError) -> State[Any]:
    """Return the state a flow run ends in when it stopped on purpose.

    A run of a deployment waits as Paused without a process, and the Resume button or the credits watcher continues it.
    A run that was started by hand ends as Failed under the same name; starting it again continues it.
    """
    name = "Stopped" if isinstance(error, StoppedError) else "BudgetReached"
    if isinstance(error, CreditsExhaustedError):
        name = "AwaitingCredits"
    if flow_run.deployment_id and name == "AwaitingCredits":
        key = f"credits-{flow_run.id}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
        return Paused(name=name, message=str(error), reschedule=True, timeout_seconds=PAUSE_TIMEOUT_S, pause_key=key)
    return Failed(name=name, message=str(error), data=error)


def _provenance(job: Job) -> dict[str, Any]:
    packages = ("eagle3-pipeline", "prefect", "httpx", "pyarrow", "tokenizers", "torch", "transformers", "speculators")
    return {
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
