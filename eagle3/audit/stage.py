"""Driver of the audit stage: token samples with their prompts and replies in; a report out.

Files: `4-audit/report.json` (an `AuditReport`) and `4-audit/report.html`. They are written whatever the verdict is; the
stage is sealed only when the run may go on.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from eagle3.artifacts import RunDirectory, ShardRef, Stage, StageManifest, verify_shard
from eagle3.audit.page import render_page
from eagle3.audit.provider_rules import Evidence, audit_providers, evidence_of
from eagle3.audit.sample_rules import audit_sample
from eagle3.audit.subject import Subject, TokenRules
from eagle3.audit.verdict import FAILED, describe_failure, judge
from eagle3.errors import AuditFailedError, CorruptShardError
from eagle3.formats import (
    COMPLETIONS,
    TOKEN_SAMPLES,
    completion_from_row,
    prompt_from_json,
    read_json_lines,
    read_rows,
    token_sample_from_row,
)
from eagle3.progress import Progress, ProgressEvent, no_progress
from eagle3.recipe import Recipe
from eagle3.records import AuditFinding, AuditReport, PromptRecord
from eagle3.tokens.grammar import grammar_of
from eagle3.tokens.profiles import ProviderProfile, read_profiles
from eagle3.tokens.tokenizer import load_tokenizer

REPORT_NAME = "report.json"
PAGE_NAME = "report.html"
PROFILES_NAME = "profiles.json"
_REPORT = TypeAdapter(AuditReport)


def audit(recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress) -> StageManifest:
    """Check every sample and every provider, write the report, and seal the stage when the run may go on.

    Args:
        recipe: Thresholds, and what providers and models are allowed.
        run: Holds the sealed prompts, completions and token samples.
        target: Prepared directory of the target model.
        progress: Told about every shard.

    Returns:
        The sealed manifest; an earlier one when nothing changed.

    Raises:
        AuditFailedError: A finding is critical and the recipe says to stop. The report is written, nothing is sealed.
        StageMissingError: An earlier stage is not complete.
        CorruptShardError: A file of an earlier stage changed, or the stages do not belong together.
        StageDriftError: The stage was sealed from other settings.
    """
    prompts, completions, samples = (
        run.sealed(stage) for stage in (Stage.PROMPTS, Stage.COMPLETIONS, Stage.TOKEN_SAMPLES)
    )
    grammar = grammar_of(recipe)
    tokenizer = load_tokenizer(target, grammar)
    stage = run.open_stage(
        Stage.AUDIT,
        _identity(recipe),
        {
            **{manifest.stage.value: manifest.digest for manifest in (prompts, completions, samples)},
            "grammar": grammar.digest,
            "tokenizer": tokenizer.digest,
        },
    )
    if stage.manifest is not None:
        return stage.manifest

    rules = TokenRules(grammar, tokenizer, recipe.target.mode, recipe.prompts.special_literals == "keep")
    findings: list[AuditFinding] = []
    evidence: list[Evidence] = []
    shards = [shard for shard in samples.shards if shard.path.endswith(".parquet")]
    for done, shard in enumerate(shards, start=1):
        for subject in _subjects(run, shard, rules, prompts, completions):
            findings += audit_sample(subject)
            evidence.append(evidence_of(subject))
        progress(ProgressEvent(stage="audit", done=done, total=len(shards), unit="shards"))
    findings += audit_providers(evidence, _profiles(run, samples), recipe.audit, recipe.generation.provider)
    report = judge(findings, evidence)
    document = _REPORT.dump_json(report, indent=2)
    files = {REPORT_NAME: document, PAGE_NAME: render_page(report).encode()}
    committed = [
        stage.commit_shard(name, partial(_write, data=data), num_samples=len(evidence)) for name, data in files.items()
    ]
    if report.verdict == FAILED and recipe.audit.stop_on_critical:
        raise AuditFailedError(describe_failure(report, f"{Stage.AUDIT.value}/{PAGE_NAME}"))
    return stage.seal(committed, _stats(report))


def _write(path: Path, *, data: bytes) -> None:
    path.write_bytes(data)


def _identity(recipe: Recipe) -> dict[str, Any]:
    provider = recipe.generation.provider
    return {
        "audit": recipe.audit.identity(),
        "mode": recipe.target.mode,
        "special_literals": recipe.prompts.special_literals,
        "provider": provider.identity(),
    }


def _stats(report: AuditReport) -> dict[str, Any]:
    return {
        "verdict": report.verdict,
        "samples": report.num_samples,
        "kept": report.num_kept,
        "dropped": len(report.dropped),
        "counts": report.counts,
        "counts_by_provider": report.counts_by_provider,
        "exactness": report.exactness,
        "delta_by_provider": report.delta_by_provider,
    }


def _subjects(
    run: RunDirectory, shard: ShardRef, rules: TokenRules, prompts: StageManifest, completions: StageManifest
) -> Iterator[Subject]:
    """Yield the samples of one shard with the prompts and replies of the shards of the same name."""
    path = verify_shard(run.stage_path(Stage.TOKEN_SAMPLES), shard)
    prompt_path = _sibling(run, prompts, shard.path.removesuffix(".parquet") + ".jsonl")
    prompt_of: dict[str, PromptRecord] = {}
    for values in read_json_lines(prompt_path):
        record = prompt_from_json(values)
        prompt_of[record.sample_id] = record
    completion_rows = {row["sample_id"]: row for row in read_rows(_sibling(run, completions, shard.path), COMPLETIONS)}
    for row in read_rows(path, TOKEN_SAMPLES):
        sample_id = cast("str", row["sample_id"])
        if sample_id not in prompt_of or sample_id not in completion_rows:
            where = Stage.PROMPTS if sample_id not in prompt_of else Stage.COMPLETIONS
            raise CorruptShardError(
                f"sample {sample_id!r} of {shard.path!r} is not in the shard of that name in {where.value!r}: the "
                f"stages are not of one run. Delete {Stage.TOKEN_SAMPLES.value!r} and run 'eagle3 reconstruct' again."
            )
        yield Subject(
            prompt=prompt_of[sample_id],
            completion=completion_from_row(completion_rows[sample_id]),
            sample=token_sample_from_row(row),
            rules=rules,
        )


def _sibling(run: RunDirectory, manifest: StageManifest, name: str) -> Path:
    for shard in manifest.shards:
        if shard.path == name:
            return verify_shard(run.stage_path(manifest.stage), shard)
    raise CorruptShardError(
        f"stage {manifest.stage.value!r} lists no shard {name!r} although a later stage has one of that name: they are "
        f"not of one run. Delete {Stage.TOKEN_SAMPLES.value!r} and run 'eagle3 reconstruct' again."
    )


def _profiles(run: RunDirectory, samples: StageManifest) -> list[ProviderProfile]:
    """Return what reconstruction learned about the providers."""
    for shard in samples.shards:
        if shard.path == PROFILES_NAME:
            return list(read_profiles(verify_shard(run.stage_path(samples.stage), shard)))
    return []
