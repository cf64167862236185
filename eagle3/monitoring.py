"""Buying answers with open eyes: what is checked before the first dollar, and while the others are spent.

The one place that joins generation with preflight and audit; stages themselves know nothing of each other.
"""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eagle3.artifacts import RunDirectory, Stage, StageManifest, commit_json
from eagle3.audit.monitor import AuditMonitor
from eagle3.errors import AuditFailedError
from eagle3.generation import (
    Answered,
    GenerationSession,
    open_session,
    seal_completions,
    settle_sealed,
    stopped_by_signals,
)
from eagle3.preflight import (
    PreflightReport,
    check_before_spending,
    probe_checks,
    probe_endpoints,
    settled_habits,
)
from eagle3.progress import Progress, no_progress
from eagle3.recipe import Recipe
from eagle3.records import JsonObject, canonical_json, sha256_text
from eagle3.tokens.grammar import grammar_of

OBJECTION_NAME = "objection.json"


class Objection:
    """What the watch of an earlier start objected to, kept beside the answers.

    A run started again must not buy more only because the same answers, seen all at once, teach the watch other habits
    than they did one by one. It stands until somebody changes grammar, target, routing or audit settings.
    """

    def __init__(self, recipe: Recipe, run: RunDirectory) -> None:
        """Name the objection of a run; nothing is read or written yet."""
        self._path = run.stage_path(Stage.COMPLETIONS) / OBJECTION_NAME
        decided_by = [
            recipe.target.identity(),
            recipe.generation.provider.model_dump(mode="json"),
            recipe.audit.model_dump(mode="json"),
            grammar_of(recipe).digest,
        ]
        self._settings = sha256_text(canonical_json(decided_by))

    def raise_if_standing(self) -> None:
        """Refuse to buy more while nothing changed since the objection.

        Raises:
            AuditFailedError: As the watch raised it then.
        """
        if self._path.is_file():
            stored: JsonObject = json.loads(self._path.read_bytes())
            if stored["settings"] == self._settings:
                raise AuditFailedError(stored["message"])
            self._path.unlink()

    def remembering(self, look: Callable[[Sequence[Answered]], None]) -> Callable[[Sequence[Answered]], None]:
        """Return `look`, writing down what it raises."""

        def look_and_remember(answers: Sequence[Answered]) -> None:
            try:
                look(answers)
            except AuditFailedError as exc:
                commit_json(self._path, {"settings": self._settings, "message": str(exc)})
                raise

        return look_and_remember


@contextmanager
def open_guarded_session(
    recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress
) -> Generator[GenerationSession]:
    """Yield a session that buys nothing before the preflight passed and stops when the audit objects.

    Endpoints are probed first when the recipe asks for it.

    Raises:
        PreflightError: A check failed; nothing was spent.
        PausedError: The budget does not even carry the probes.
        ProviderError: No request can work.
    """
    check_before_spending(recipe, run, target)
    is_watched = recipe.audit.while_generating and recipe.audit.stop_on_critical
    monitor = AuditMonitor(recipe, target, settled_habits(run)) if is_watched else None
    objection = Objection(recipe, run)
    if monitor is not None:
        objection.raise_if_standing()
    check = objection.remembering(monitor.look) if monitor is not None else None
    with open_session(recipe, run, target, progress, check) as session:
        if recipe.generation.preflight_probes:
            path = probe_endpoints(session, recipe, session.stage, target, progress)
            PreflightReport(checks=probe_checks(path)).raise_if_failed()
            if monitor is not None:
                monitor.settle(settled_habits(run))
        yield session


def generate_guarded(
    recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress
) -> StageManifest:
    """Buy every answer of a run and seal the stage; reuse it when it is sealed. SIGINT and SIGTERM stop it cleanly.

    Raises:
        PreflightError: A check failed; nothing was spent.
        AuditFailedError: Answers bought so far show that more of them would be useless.
        PausedError: Money ended, or somebody stopped; run again to continue.
        ProviderError: No request can work, or too many samples failed.
    """
    sealed = settle_sealed(recipe, run, target)
    if sealed is not None:
        return sealed
    with open_guarded_session(recipe, run, target, progress) as session, stopped_by_signals(session.stop):
        session.generate_all()
    return seal_completions(session)
