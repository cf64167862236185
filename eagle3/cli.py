"""The `eagle3` command. Results go to standard output, everything else to standard error."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eagle3 import __version__
from eagle3.artifacts import RunDirectory, Stage
from eagle3.commands import generation, operations, preflight, tokens
from eagle3.commands.reporting import notes, reported
from eagle3.errors import ConfigurationError
from eagle3.recipe import Recipe, load_recipe
from eagle3.stages import ORDER, from_stage_on, run_stage

app = typer.Typer(
    name="eagle3",
    help="From a recipe to an EAGLE-3 draft model that SGLang or vLLM loads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEMO_RECIPE = Path(__file__).parent.parent / "deployments" / "recipes" / "tiny_cpu.yaml"

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe file (YAML).", show_default=False)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe value; repeatable.")
]
RunRootOption = Annotated[Path, typer.Option("--run-root", help="Folder that holds the run directories.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON for programs.")]
StageOption = Annotated[
    str | None, typer.Option("--until", metavar="STAGE", help="Last stage to make, by its command name.")
]
RedoOption = Annotated[
    str | None, typer.Option("--redo", metavar="STAGE", help="Make this stage and all later ones anew.")
]


def _home() -> Path:
    return Path(os.environ.get("EAGLE3_HOME", ".eagle3")).resolve()


def _check_stage_name(name: str | None, option: str) -> None:
    if name is not None and name not in {stage.command for stage in ORDER}:
        wanted = ", ".join(stage.command for stage in ORDER)
        raise ConfigurationError(f"{option} {name!r} is no stage; expected one of {wanted}")


@app.command()
def run(
    recipe: RecipeArgument,
    run_root: RunRootOption = Path("runs"),
    until: StageOption = None,
    redo: RedoOption = None,
    overrides: SetOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Run the whole pipeline as a Prefect flow, continuing where an earlier run stopped."""
    with reported():
        _check_stage_name(until, "--until")
        _check_stage_name(redo, "--redo")
        if redo in {Stage.PROMPTS.command, Stage.COMPLETIONS.command}:
            raise ConfigurationError(
                f"--redo {redo} would throw away answers that were paid for. Start a run under another name instead."
            )
        checked = load_recipe(recipe, overrides or ())
        result, error = _run_flow(recipe, overrides or [], run_root, until, redo)
        directory = RunDirectory(run_root / checked.run_name)
        if error is None or directory.path.is_dir():  # else the error came before anything was written
            _show_summary(directory, result, as_json=as_json)
        if error is not None:
            raise error


def _run_flow(
    recipe: Path, overrides: list[str], run_root: Path, until: str | None, redo: str | None
) -> tuple[dict[str, Any], BaseException | None]:
    """Run the flow in this process; returns its result and, when it did not complete, its error."""
    from deployments.server import ensure_server

    with notes.status("looking for a Prefect server (the first start takes half a minute)"):
        url = ensure_server(_home())
    notes.print(f"Prefect UI: {url}", highlight=False)
    # The terminal shows bars, the summary and at the end the error; log lines and tracebacks go to the server.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    from eagle3.terminal import TerminalProgress
    from flows.pipeline import pipeline
    from tasks.progress import listening

    with TerminalProgress(notes) as terminal, listening(terminal):
        state = pipeline(
            recipe=str(recipe),
            overrides=overrides,
            run_root=str(run_root),
            home=str(_home()),
            until=until or "export",  # pyright: ignore[reportArgumentType] - checked by the caller
            redo=redo or "nothing",  # pyright: ignore[reportArgumentType] - checked by the caller
            return_state=True,
        )
    outcome = state.result(raise_on_failure=False)
    return (outcome, None) if isinstance(outcome, dict) else ({}, _error_of(outcome))


def _error_of(outcome: object) -> BaseException:
    return outcome if isinstance(outcome, BaseException) else ConfigurationError(f"the flow ended as {outcome!r}")


def _show_summary(directory: RunDirectory, result: dict[str, Any], *, as_json: bool) -> None:
    from eagle3.report import read_summary, render_summary

    summary = {**read_summary(directory), **result}
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        return
    console = Console()
    console.print(render_summary(summary))
    if result and not result["stages_made"]:
        console.print("Nothing to do: every stage was already complete. Spent now: $0.", highlight=False)
    elif result:
        made = ", ".join(result["stages_made"])
        console.print(f"Made now: {made}. Spent now: ${result['spent_now_usd']}.", highlight=False)
    console.print(f"Report: {os.path.relpath(directory.report_path)}", highlight=False)


@app.command()
def demo(run_root: RunRootOption = Path("runs"), overrides: SetOption = None, *, as_json: JsonOption = False) -> None:
    """Run the tiny recipe end to end on a real small model, against the OpenRouter look-alike: no key, no cost."""
    run(DEMO_RECIPE, run_root, None, None, overrides, as_json=as_json)
    if not as_json:
        notes.print("The Prefect server stays up so that you can look at the run; 'eagle3 down' stops it.")


@app.command()
def plan(
    recipe: RecipeArgument,
    run_root: RunRootOption = Path("runs"),
    overrides: SetOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Say what a run would cost, expected and at worst. Spends nothing."""
    with reported():
        from eagle3.generation import estimate_cost, render_plan
        from eagle3.terminal import TerminalProgress

        checked, directory, target = _prepare(recipe, overrides, run_root)
        with directory.locked():
            with TerminalProgress(notes) as terminal:
                run_stage(Stage.PROMPTS, checked, directory, target, terminal)
            costs = estimate_cost(checked, directory, target)
        if as_json:
            sys.stdout.write(json.dumps(costs.to_json(), indent=2) + "\n")
        else:
            Console().print(render_plan(costs))


@app.command()
def status(
    run_directory: Annotated[Path, typer.Argument(help="A run directory, for example runs/latest.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Tell where a run stands: stages, datasets, spend, and what is unfinished and why."""
    with reported():
        from eagle3.report import render_status, run_status

        found = run_status(_existing_run(run_directory))
        if as_json:
            sys.stdout.write(json.dumps(found.to_json(), indent=2, ensure_ascii=False) + "\n")
        else:
            Console().print(render_status(found))


@app.command()
def report(run_directory: Annotated[Path, typer.Argument(help="A run directory, for example runs/latest.")]) -> None:
    """Write summary.json and report.html of a run again."""
    with reported():
        from eagle3.report import write_report, write_summary

        directory = _existing_run(run_directory)
        write_summary(directory)
        write_report(directory)
        sys.stdout.write(f"{os.path.relpath(directory.report_path)}\n")


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)
def simulate(context: typer.Context) -> None:
    """Serve the OpenRouter look-alike: real shapes, prices, habits and faults on loopback."""
    from eagle3.simulator.__main__ import main as simulator

    raise typer.Exit(simulator(context.args))


def _prepare(recipe: Path, overrides: list[str] | None, run_root: Path) -> tuple[Recipe, RunDirectory, Path]:
    from eagle3.target import prepare_target

    checked = load_recipe(recipe, overrides or ())
    directory = RunDirectory((run_root / checked.run_name).resolve())
    return checked, directory, prepare_target(checked, _home() / "models")


def _existing_run(path: Path) -> RunDirectory:
    run = RunDirectory(path.resolve())
    if not any(run.stage_path(stage).is_dir() for stage in Stage) and not (run.path / "recipe.resolved.json").is_file():
        raise ConfigurationError(f"{str(path)!r} is no run directory: it holds no stage. Runs live under 'runs/'.")
    return run


def _stage_command(stage: Stage) -> Callable[..., None]:
    def command(
        recipe: RecipeArgument,
        run_root: RunRootOption = Path("runs"),
        overrides: SetOption = None,
        *,
        redo: Annotated[bool, typer.Option("--redo", help="Make it and all later stages anew.")] = False,
        as_json: JsonOption = False,
    ) -> None:
        with reported():
            from eagle3.progress_log import ProgressLog
            from eagle3.report import is_data_shard
            from eagle3.terminal import TerminalProgress

            checked, directory, target = _prepare(recipe, overrides, run_root)
            with directory.locked(), TerminalProgress(notes) as terminal:
                if redo:
                    directory.discard(from_stage_on(stage))
                log = ProgressLog(directory.path / "progress.jsonl")
                try:
                    manifest = run_stage(
                        stage, checked, directory, target, lambda event: (terminal(event), log(event))[0]
                    )
                finally:
                    log.close()
            if as_json:
                sys.stdout.write(
                    json.dumps({"stage": stage.value, "digest": manifest.digest, "stats": manifest.stats}) + "\n"
                )
            else:
                samples = sum(shard.num_samples for shard in manifest.shards if is_data_shard(shard.path))
                counted = f"{samples} samples, " if samples else ""
                sys.stdout.write(f"{stage.value}: {counted}digest {manifest.digest[:12]}\n")

    command.__doc__ = f"Make stage {stage.value} of a run, without a Prefect server."
    return command


for _operation in (operations.up, operations.down, operations.deploy, operations.doctor):
    app.command()(_operation)
app.command()(preflight.preflight)
app.command()(tokens.reconstruct_file)
app.add_typer(tokens.grammar_app)
app.command()(generation.import_answers)
for _stage in ORDER:
    _command = _stage_command(_stage)
    app.command(name=_stage.command)(generation.generate_command(_command) if _stage is Stage.COMPLETIONS else _command)


def _print_version(value: bool) -> None:  # noqa: FBT001 - the signature typer calls
    if value:
        sys.stdout.write(f"eagle3-pipeline {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction] - registered by the decorator
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    # Idle OpenMP threads that spin take the core from their neighbours: on shared cores that costs several times the
    # CPU time of the work itself. Source: tests/bench/bench_extraction.py.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Libraries draw bars of their own across ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    app()
