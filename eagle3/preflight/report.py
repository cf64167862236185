"""The preflight as callers use it: all checks at once, the part that guards spending, and the probes of a run."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from eagle3.artifacts import OpenStage, RunDirectory, ShardRef, Stage, read_manifest
from eagle3.preflight.checks import PreflightReport
from eagle3.preflight.environment import check_environment
from eagle3.preflight.probing import TOOL_NAME, Asker, EndpointProbes, probe_all
from eagle3.progress import Progress, no_progress
from eagle3.recipe import Recipe
from eagle3.records import JsonObject
from eagle3.tokens.checklist import Check, Outcome, Recorder
from eagle3.tokens.checks import check_tokens
from eagle3.tokens.grammar import ResponseGrammar, grammar_of
from eagle3.tokens.probed import PROBES_NAME, Settled, read_settled
from eagle3.tokens.rendering import open_renderer


def run_checks(recipe: Recipe, run: RunDirectory, target: Path, stages: Sequence[Stage]) -> PreflightReport:
    """Make every check that needs no network.

    Args:
        recipe: Checked.
        run: Its directory, which need not exist.
        target: Prepared directory of the target model.
        stages: Those that are to be made.
    """
    recorder = check_offline(recipe, target)
    check_environment(recipe, run, target, stages, recorder)
    return PreflightReport(checks=recorder.checks)


def check_offline(recipe: Recipe, target: Path) -> Recorder:
    """Make the checks P0 to P9 for a recipe and its prepared target; never raises for what they find."""
    recorder = Recorder()
    grammar = _load_grammar(recipe, recorder)
    if grammar is not None:
        check_tokens(grammar, target, [recipe.target.mode], recipe.target.template_options, recorder)
    return recorder


def _load_grammar(recipe: Recipe, recorder: Recorder) -> ResponseGrammar | None:
    with recorder.check("P0", "response grammar", "Correct target.grammar, target.mode or the grammar file.") as note:
        grammar = grammar_of(recipe)
        note(f"{grammar.name!r} version {grammar.version}, mode {recipe.target.mode!r}")
        return grammar
    return None


def require_environment(recipe: Recipe, run: RunDirectory, target: Path, stages: Sequence[Stage]) -> None:
    """Refuse a run whose later stages could not be made on this machine. Sealed stages need nothing any more.

    Raises:
        PreflightError: Something they need is missing.
    """
    recorder = Recorder()
    open_stages = [stage for stage in stages if read_manifest(run.stage_path(stage)) is None]
    check_environment(recipe, run, target, open_stages, recorder)
    PreflightReport(checks=recorder.checks).raise_if_failed()


def check_before_spending(recipe: Recipe, run: RunDirectory, target: Path) -> PreflightReport:
    """Make the checks that must hold before money is spent.

    Raises:
        PreflightError: One failed.
    """
    report = run_checks(recipe, run, target, [Stage.COMPLETIONS])
    report.raise_if_failed()
    return report


def probe_endpoints(
    asker: Asker, recipe: Recipe, stage: OpenStage, target: Path, progress: Progress = no_progress
) -> Path:
    """Probe every eligible endpoint once per run and keep what they answered beside the completions.

    Args:
        asker: Asks and pays.
        recipe: Of the run.
        stage: Its completions, open.
        target: Prepared directory of the target model.
        progress: Told about every endpoint.

    Returns:
        The file with the probes; one of an earlier call is kept as it is.

    Raises:
        PausedError: Money ended.
        TokenError: Grammar, tokenizer and template do not fit one another.
    """
    if stage.existing_shard(PROBES_NAME) is None:
        probes = probe_all(asker, recipe, open_renderer(recipe, target), progress)
        write_probes(stage, probes)
    return stage.file(PROBES_NAME)


def write_probes(stage: OpenStage, probes: Sequence[EndpointProbes]) -> ShardRef:
    """Commit the probes of a run."""
    document = {"schema": 1, "endpoints": [each.to_json() for each in probes]}
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return stage.commit_shard(
        PROBES_NAME, partial(_write_text, text=text), num_samples=0, stats={"role": "probes", "endpoints": len(probes)}
    )


def settled_habits(run: RunDirectory) -> Settled:
    """Return what the probes of a run settled, nothing when there are none."""
    return read_settled(run.stage_path(Stage.COMPLETIONS) / PROBES_NAME)


def probe_checks(path: Path) -> list[Check]:
    """Return what the probes of a run say, as checks: a wrong prompt count is a failure, open axes a warning."""
    document: JsonObject = json.loads(path.read_bytes())
    checks: list[Check] = []
    for endpoint in document["endpoints"]:
        checks += _checks_of(endpoint)
    return checks


def _checks_of(endpoint: JsonObject) -> list[Check]:
    tag, counts = str(endpoint["tag"]), dict[str, list[int]](endpoint["prompt_counts"])
    is_told = counts.keys() - {TOOL_NAME}
    wrong = {name: pair for name, pair in counts.items() if pair[0] != pair[1]}
    found = f"{len(counts) - len(wrong)} of {len(counts)} prompts are billed as rendered"
    if wrong:
        found += "; " + ", ".join(f"{name}: expected {pair[0]}, billed {pair[1]}" for name, pair in wrong.items())
    settled = ", ".join(f"{axis} = {'/'.join(map(str, values))}" for axis, values in endpoint["settled"].items())
    gives = [name for key, name in (("gives_ids", "token ids"), ("gives_logprobs", "logprobs")) if endpoint[key]]
    return [
        _check(
            "P10",
            tag,
            # Tools are declared in more than one way; runs without tools do not meet the difference.
            Outcome.FAILED if wrong.keys() & is_told else (Outcome.PASSED if counts and not wrong else Outcome.WARNING),
            found,
            "It renders another chat template: leave it out (routing.ignore), or check target.mode and options.",
        ),
        _check(
            "P11",
            tag,
            Outcome.PASSED if settled else Outcome.WARNING,
            f"habits: {settled or 'nothing settled'}",
            "They are learned from the answers, as far as counts tell them.",
        ),
        *[
            _check("P12", tag, Outcome.WARNING, problem, "Its answers decide; look at them early.")
            for problem in endpoint["problems"]
        ],
        _check("P13", tag, Outcome.PASSED, f"cut answers stand in {endpoint['cut_lands_in'] or 'nothing seen'}", ""),
        _check("P14", tag, Outcome.PASSED, f"gives {' and '.join(gives) or 'neither token ids nor logprobs'}", ""),
        _check(
            "P15",
            tag,
            Outcome.PASSED,
            f"{endpoint['provider']}, {', '.join(endpoint['models']) or 'no answer'}, "
            f"{endpoint['quantization'] or 'precision not declared'}, {endpoint['spent_usd']} USD",
            "",
        ),
    ]


def _check(check_id: str, tag: str, outcome: Outcome, found: str, advice: str) -> Check:
    is_fine = outcome is Outcome.PASSED
    return Check(id=check_id, name=f"endpoint {tag}", outcome=outcome, found=found, advice="" if is_fine else advice)


def _write_text(path: Path, *, text: str) -> None:
    path.write_text(text, encoding="utf-8")
