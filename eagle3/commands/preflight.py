"""The `preflight` command: everything that can be checked before money is spent, and with `--online` the endpoints."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eagle3.artifacts import RunDirectory, Stage
from eagle3.commands.reporting import notes, reported
from eagle3.errors import ConfigurationError
from eagle3.recipe import load_recipe
from eagle3.stages import ORDER

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe file (YAML).", show_default=False)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe value; repeatable.")
]
RunRootOption = Annotated[Path, typer.Option("--run-root", help="Folder that holds the run directories.")]
UntilOption = Annotated[
    str, typer.Option("--until", metavar="STAGE", help="Last stage that is to be made, by its command name.")
]
OnlineOption = Annotated[
    bool, typer.Option("--online", help="Also ask every eligible endpoint about ten questions, at most a cent each.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON for programs.")]


def preflight(
    recipe: RecipeArgument,
    run_root: RunRootOption = Path("runs"),
    until: UntilOption = "export",
    overrides: SetOption = None,
    *,
    online: OnlineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check tokenizer, template, grammar, key, files and disk before a run; exit code 2 when something is wrong."""
    with reported():
        from eagle3.preflight import PreflightReport, render_checks, run_checks
        from eagle3.target import prepare_target

        commands = [stage.command for stage in ORDER]
        if until not in commands:
            raise ConfigurationError(f"--until {until!r} is no stage; expected one of {', '.join(commands)}")
        checked = load_recipe(recipe, overrides or ())
        run = RunDirectory((run_root / checked.run_name).resolve())
        home = Path(os.environ.get("EAGLE3_HOME", ".eagle3")).resolve()
        target = prepare_target(checked, home / "models")
        report = run_checks(checked, run, target, ORDER[: commands.index(until) + 1])
        if online and not report.failed:
            from eagle3.generation import open_session
            from eagle3.preflight import probe_checks, probe_endpoints
            from eagle3.stages import run_stage

            with run.locked(), notes.status("asking the endpoints"):
                run_stage(Stage.PROMPTS, checked, run, target)
                with open_session(checked, run, target) as session:
                    if session.stage.manifest is not None:
                        raise ConfigurationError("the answers of this run are complete; probes come before them.")
                    path = probe_endpoints(session, checked, session.stage, target)
            report = PreflightReport(checks=[*report.checks, *probe_checks(path)])
        if as_json:
            sys.stdout.write(json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
        else:
            Console().print(render_checks(report.checks))
        report.raise_if_failed()
