"""The order of the stages and how each is called: the one place that knows them all.

Stages never call each other. The command line, the tasks and the flows go through this table.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from eagle3.artifacts import RunDirectory, Stage, StageManifest
from eagle3.progress import Progress, no_progress
from eagle3.recipe import Recipe

Driver: TypeAlias = Callable[[Recipe, RunDirectory, Path, Progress], StageManifest]

ORDER: tuple[Stage, ...] = tuple(Stage)

_DRIVERS: dict[Stage, tuple[str, str]] = {
    Stage.PROMPTS: ("eagle3.prompts", "prepare_prompts"),
    Stage.COMPLETIONS: ("eagle3.monitoring", "generate_guarded"),
    Stage.TOKEN_SAMPLES: ("eagle3.reconstruction", "reconstruct_completions"),
    Stage.AUDIT: ("eagle3.audit", "audit"),
    Stage.CORPUS: ("eagle3.corpus", "assemble_corpus"),
    Stage.HIDDEN_STATES: ("eagle3.hidden_states", "extract_hidden_states"),
    Stage.DRAFT: ("eagle3.drafter", "train_draft"),
    Stage.EVALUATION: ("eagle3.drafter", "evaluate_draft"),
    Stage.EXPORT: ("eagle3.drafter", "export_draft"),
}


def driver_of(stage: Stage) -> Driver:
    """Return the function that makes a stage; heavy libraries load only when it is called for."""
    module, name = _DRIVERS[stage]
    driver: Driver = getattr(import_module(module), name)
    return driver


def run_stage(
    stage: Stage, recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress
) -> StageManifest:
    """Make one stage, or return its manifest when it is already sealed for this recipe."""
    return driver_of(stage)(recipe, run, target, progress)


def stage_of_command(command: str) -> Stage:
    """Return the stage that an `eagle3` sub-command makes.

    Raises:
        KeyError: There is no such command.
    """
    return {stage.command: stage for stage in Stage}[command]


def from_stage_on(first: Stage) -> tuple[Stage, ...]:
    """Return `first` and all later stages."""
    return ORDER[ORDER.index(first) :]
