"""Commands about buying answers: opening a finished stage again, and bringing answers along."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from eagle3.artifacts import RunDirectory
from eagle3.commands.reporting import notes, reported
from eagle3.errors import ConfigurationError
from eagle3.recipe import Recipe, load_recipe
from eagle3.records import FailureClass

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe file (YAML).", show_default=False)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe value; repeatable.")
]
RunRootOption = Annotated[Path, typer.Option("--run-root", help="Folder that holds the run directories.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON for programs.")]
RetryOption = Annotated[
    list[str] | None,
    typer.Option("--retry-failed", metavar="CLASS", help="First open failures of this class again; repeatable."),
]
ReopenOption = Annotated[
    bool, typer.Option("--reopen", help="Look again at a finished stage: a token budget was raised.")
]


def generate_command(make_stage: Callable[..., None]) -> Callable[..., None]:
    """Return the `generate` command: `make_stage`, after opening again what the options name."""

    def generate(
        recipe: RecipeArgument,
        run_root: RunRootOption = Path("runs"),
        overrides: SetOption = None,
        retry_failed: RetryOption = None,
        *,
        reopen: ReopenOption = False,
        as_json: JsonOption = False,
    ) -> None:
        """Buy the answers of a run (stage 2-completions), without a Prefect server."""
        with reported():
            classes = _classes(retry_failed or [])
            if classes or reopen:
                from eagle3.generation import reopen as reopen_stage

                checked, run = _run_of(recipe, overrides, run_root)
                with run.locked():
                    opened = reopen_stage(checked, run, classes)
                told = ", ".join(f"{count} {name.value}" for name, count in sorted(opened.items()))
                notes.print(f"opened again: {told or 'no failures'}", highlight=False)
        make_stage(recipe, run_root, overrides, as_json=as_json)

    return generate


def import_answers(
    recipe: RecipeArgument,
    dataset: Annotated[str, typer.Argument(help="Dataset of the recipe.", show_default=False)],
    answers: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One answer per line.", show_default=False)],
    run_root: RunRootOption = Path("runs"),
    overrides: SetOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Take answers that exist already, so that they are not bought: lines with `messages` or `id`, and the answer."""
    with reported():
        from eagle3.generation import import_answers as take

        checked, run = _run_of(recipe, overrides, run_root)
        with run.locked():
            result = take(checked, run, dataset, answers)
        if as_json:
            sys.stdout.write(json.dumps(result.to_json(), ensure_ascii=False) + "\n")
            return
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(result.skipped.items()))
        sys.stdout.write(
            f"imported {result.imported} answers with {result.completion_tokens} tokens"
            f"{'; not taken: ' + skipped if skipped else ''}\n"
        )
        for example in result.examples:
            notes.print(example, markup=False, highlight=False)


def _run_of(recipe: Path, overrides: list[str] | None, run_root: Path) -> tuple[Recipe, RunDirectory]:
    checked = load_recipe(recipe, overrides or ())
    return checked, RunDirectory((run_root / checked.run_name).resolve())


def _classes(names: list[str]) -> frozenset[FailureClass]:
    known = [entry.value for entry in FailureClass]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigurationError(f"--retry-failed {unknown[0]!r} is no failure class; expected one of {known}")
    return frozenset(map(FailureClass, names))
