"""Buying answers with open eyes: what is checked before the first dollar, and while the others are spent.

The one place that joins generation with preflight and audit; stages themselves know nothing of each other.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from eagle3.artifacts import RunDirectory, StageManifest
from eagle3.audit.monitor import AuditMonitor
from eagle3.generation import (
    GenerationSession,
    open_completions,
    open_session,
    seal_completions,
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
    with open_session(recipe, run, target, progress, monitor.look if monitor is not None else None) as session:
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
    stage = open_completions(recipe, run)
    if stage.manifest is not None:
        return stage.manifest
    with open_guarded_session(recipe, run, target, progress) as session, stopped_by_signals(session.stop):
        session.generate_all()
    return seal_completions(session)
