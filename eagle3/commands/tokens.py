"""Commands about tokens: loose reply files to ids, and checks for people who add a model family."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eagle3.commands.reporting import reported
from eagle3.errors import ConfigurationError, TokenError

grammar_app = typer.Typer(name="grammar", help="Response grammars: list them, check one.", no_args_is_help=True)

TokenizerOption = Annotated[
    Path, typer.Option("--tokenizer", metavar="DIR", help="Tokenizer files of the model.", show_default=False)
]
GrammarOption = Annotated[
    str, typer.Option("--grammar", metavar="NAME", help="A packaged grammar, or a .yaml file.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON for programs.")]


def reconstruct_file(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Replies, one per line.", show_default=False)],
    output: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="Ids, one row per line.", show_default=False)],
    tokenizer: TokenizerOption,
    grammar: GrammarOption,
    grammar_map: Annotated[
        Path | None, typer.Option("--grammar-map", metavar="FILE", help="YAML or JSON: model pattern to grammar.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", help="Mode of all replies; by default each request's own.")
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", metavar="R.json", help="Write the report here.")] = None,
    min_samples: Annotated[
        int, typer.Option("--min-samples", min=1, help="Answers that identify a provider's habit.")
    ] = 20,
    *,
    as_json: JsonOption = False,
) -> None:
    """Rebuild the token ids of recorded replies, with a grade and findings for each, grouped by provider and model."""
    with reported():
        from eagle3.loose.families import GrammarChoice, read_grammar_map
        from eagle3.loose.rebuilding import reconstruct_file as rebuild
        from eagle3.loose.showing import render_report

        patterns = read_grammar_map(grammar_map) if grammar_map is not None else {}
        choice = GrammarChoice(tokenizer=tokenizer, default=grammar, patterns=patterns)
        try:
            family = choice.default_family()
            if mode is not None:
                family.grammar.mode(mode)
        except TokenError as exc:
            raise ConfigurationError(str(exc)) from exc
        made = rebuild(source, output, choice=choice, mode=mode, report=report, min_samples=min_samples)
        if as_json:
            sys.stdout.write(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
        else:
            Console().print(render_report(made))


@grammar_app.command(name="list")
def list_grammars(*, as_json: JsonOption = False) -> None:
    """List the packaged grammars."""
    with reported():
        from eagle3.tokens.grammar import load_grammar, packaged_grammars

        grammars = [load_grammar(name) for name in packaged_grammars()]
        if as_json:
            found = [
                {
                    "name": each.name,
                    "version": each.version,
                    "modes": list(each.modes),
                    "tools": each.tools is not None,
                    "models": list(each.models),
                }
                for each in grammars
            ]
            sys.stdout.write(json.dumps(found, indent=2) + "\n")
            return
        table = Table("grammar", "version", "modes", "tool calls", "models")
        for each in grammars:
            calls = "yes" if each.tools is not None else "refused"
            table.add_row(each.name, str(each.version), ", ".join(each.modes), calls, ", ".join(each.models))
        Console().print(table)


@grammar_app.command(name="check")
def check_grammar(tokenizer: TokenizerOption, grammar: GrammarOption, *, as_json: JsonOption = False) -> None:
    """Check a grammar against the tokenizer, configuration and template of a model; exit 2 when a check fails."""
    with reported():
        from eagle3.preflight import PreflightReport, render_checks
        from eagle3.tokens.checks import check_family

        report = PreflightReport(checks=check_family(tokenizer, grammar))
        if as_json:
            sys.stdout.write(json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
        else:
            Console().print(render_checks(report.checks))
        if report.failed:
            names = ", ".join(check.name for check in report.failed)
            raise ConfigurationError(
                f"{len(report.failed)} of {len(report.checks)} checks failed: {names}. Correct the grammar."
            )
