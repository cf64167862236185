"""Driver of the reconstruction stage: sealed completions in, token samples with grades out.

Files: `3-token-samples/<dataset>/shard-00000.parquet`, one row per completion in the same order; `profiles.json`, what
was learned about the providers; `findings.jsonl`, what was noticed on single samples. Two passes over the completions:
the first learns the habits of each provider, the second rebuilds ids. The per-sample function is
`eagle3.tokens.reconstruct`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from eagle3.artifacts import OpenStage, RunDirectory, ShardRef, Stage, StageManifest, verify_shard
from eagle3.errors import CorruptShardError, TokenError
from eagle3.formats import (
    COMPLETIONS,
    TOKEN_SAMPLES,
    completion_from_row,
    prompt_from_json,
    read_json_lines,
    read_table,
    token_sample_to_row,
    write_json_lines,
    write_rows,
)
from eagle3.progress import Progress, ProgressEvent, no_progress
from eagle3.providers.wire import parse_reply
from eagle3.recipe import Recipe
from eagle3.records import Completion, PromptRecord, SegmentKind
from eagle3.tokens.comparison import fit_providers
from eagle3.tokens.ground_truth import Agreement, compare_with_truth
from eagle3.tokens.probed import PROBES_NAME, Settled, read_settled
from eagle3.tokens.profiles import ProviderProfile, read_profiles, write_profiles
from eagle3.tokens.reconstruct import Reconstruction, reconstruct, unrebuilt
from eagle3.tokens.rendering import PromptRenderer, open_renderer

PROFILES_NAME = "profiles.json"
FINDINGS_NAME = "findings.jsonl"
FINDINGS_FOLDER = ".findings"
"""Findings of single shards, until the stage is sealed."""
MAX_FIT_SAMPLES = 2000
"""Answers of one provider from which its habits are learned; more would not change what is learned."""


def reconstruct_completions(
    recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress
) -> StageManifest:
    """Rebuild the token ids of all completions of a run and seal them.

    Count mismatches and answers that cannot be rebuilt are kept, graded as such: the audit decides about them.

    Args:
        recipe: Names target, mode and how ids are rebuilt.
        run: Holds the sealed prompts and completions.
        target: Prepared directory of the target model.
        progress: Told about every shard.

    Returns:
        The sealed manifest; an earlier one when nothing changed.

    Raises:
        StageMissingError: Prompts or completions are not complete.
        StageDriftError: The stage was sealed from other settings, files or answers.
        CorruptShardError: A file of an earlier stage changed.
        TokenError: Grammar, tokenizer and template do not fit one another.
    """
    renderer, stage = _open(recipe, run, target)
    if stage.manifest is not None:
        return stage.manifest
    fit_profiles(recipe, run, target, progress)
    sources = _completion_shards(run)
    total = sum(shard.num_samples for shard in sources)
    shards: list[ShardRef] = []
    for shard in sources:
        shards.append(_reconstruct_shard(recipe, run, renderer, stage, shard))
        done = sum(made.num_samples for made in shards)
        progress(ProgressEvent(stage="reconstruction", label=_dataset(shard), done=done, total=total))
    return seal_token_samples(recipe, run, target, shards)


def fit_profiles(recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress) -> ShardRef:
    """Learn the habits of every provider from all completions and commit `profiles.json`.

    Returns:
        The committed file; the one of an earlier call for the same settings.
    """
    renderer, stage = _open(recipe, run, target)
    existing = stage.existing_shard(PROFILES_NAME)
    if existing is not None:
        return existing
    groups: dict[tuple[str, str], list[Completion]] = {}
    sources = _completion_shards(run)
    for done, shard in enumerate(sources, start=1):
        for completion in _completions(run, shard):
            groups.setdefault((completion.provider, completion.model), []).append(completion)
        for group in groups.values():
            # Sample ids are digests: the smallest ones are a fair and repeatable choice.
            group.sort(key=lambda completion: completion.sample_id)
            del group[MAX_FIT_SAMPLES:]
        progress(ProgressEvent(stage="reconstruction", label="profiles", done=done, total=len(sources), unit="shards"))
    fitted = fit_providers(
        groups,
        renderer.grammar,
        renderer.tokenizer,
        renderer.mode,
        min_samples=recipe.reconstruction.min_profile_samples,
        probed=_probed(run),
    )
    profiles = [fitted[key] for key in sorted(fitted)]
    return stage.commit_shard(
        PROFILES_NAME,
        partial(write_profiles, profiles=profiles),
        num_samples=sum(profile.num_samples for profile in profiles),
        stats={"role": "profiles"},
    )


def reconstruct_shard(recipe: Recipe, run: RunDirectory, target: Path, shard: ShardRef) -> ShardRef:
    """Rebuild one shard of completions; profiles must have been fitted.

    Args:
        recipe: As for `reconstruct_completions`.
        run: Same.
        target: Same.
        shard: One of the Parquet shards of the sealed completions.

    Returns:
        The committed shard; the one of an earlier call for the same settings.
    """
    renderer, stage = _open(recipe, run, target)
    return _reconstruct_shard(recipe, run, renderer, stage, shard)


def seal_token_samples(recipe: Recipe, run: RunDirectory, target: Path, shards: Sequence[ShardRef]) -> StageManifest:
    """Seal the stage once every completions shard was rebuilt.

    Args:
        recipe: As for `reconstruct_completions`.
        run: Same.
        target: Same.
        shards: What `reconstruct_shard` returned, in the order of the completions shards.
    """
    renderer, stage = _open(recipe, run, target)
    profiles_ref = fit_profiles(recipe, run, target)
    profiles = read_profiles(stage.file(PROFILES_NAME))
    findings = [row for shard in shards for row in read_json_lines(stage.file(_findings_name(shard.path)))]
    findings_ref = stage.commit_shard(
        FINDINGS_NAME,
        partial(write_json_lines, rows=findings),
        num_samples=len(findings),
        stats={"role": "findings"},
    )
    return stage.seal([*shards, profiles_ref, findings_ref], _stats(renderer, shards, profiles, findings))


def _stats(
    renderer: PromptRenderer,
    shards: Sequence[ShardRef],
    profiles: Sequence[ProviderProfile],
    findings: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    datasets: dict[str, Counter[str]] = {}
    exactness: Counter[str] = Counter()
    truth: Counter[str] = Counter()
    for shard in shards:
        counts = datasets.setdefault(str(shard.stats["dataset"]), Counter())
        counts.update({name: shard.stats[name] for name in ("prompt_tokens", "completion_tokens", "masked_tokens")})
        counts["samples"] += shard.num_samples
        exactness.update(cast("Mapping[str, int]", shard.stats["exactness"]))
        truth.update(cast("Mapping[str, int]", shard.stats.get("truth", {})))
    totals = sum(datasets.values(), Counter[str]())
    return {
        "samples": totals["samples"],
        "exactness": dict(sorted(exactness.items())),
        "truth": dict(sorted(truth.items())),
        "prompt_tokens": totals["prompt_tokens"],
        "completion_tokens": totals["completion_tokens"],
        "masked_tokens": totals["masked_tokens"],
        "findings": dict(sorted(Counter(str(row["rule"]) for row in findings).items())),
        "profiles": {f"{profile.provider} · {profile.model}": profile.to_json() for profile in profiles},
        "datasets": {name: dict(sorted(counts.items())) for name, counts in sorted(datasets.items())},
        "tokenizer": renderer.tokenizer.digest,
    }


def _open(recipe: Recipe, run: RunDirectory, target: Path) -> tuple[PromptRenderer, OpenStage]:
    renderer = open_renderer(recipe, target)
    identity = {"reconstruction": recipe.reconstruction.identity(), "mode": recipe.target.mode}
    inputs = {stage.value: run.sealed(stage).digest for stage in (Stage.PROMPTS, Stage.COMPLETIONS)}
    return renderer, run.open_stage(Stage.TOKEN_SAMPLES, identity, {**inputs, "prompt_rendering": renderer.digest})


def _reconstruct_shard(
    recipe: Recipe, run: RunDirectory, renderer: PromptRenderer, stage: OpenStage, shard: ShardRef
) -> ShardRef:
    existing = stage.existing_shard(shard.path)
    if existing is not None and stage.existing_shard(_findings_name(shard.path)) is not None:
        return existing
    profiles = {(profile.provider, profile.model): profile for profile in read_profiles(stage.file(PROFILES_NAME))}
    truth: Counter[str] = Counter()
    results = list(_rebuild(recipe, run, renderer, profiles, shard, truth))
    findings = [asdict(finding) for result in results for finding in result.findings]
    stage.commit_shard(_findings_name(shard.path), partial(write_json_lines, rows=findings), num_samples=len(findings))
    samples = [result.sample for result in results]
    num_prompt = sum(sample.num_prompt_tokens for sample in samples)
    num_tokens = sum(len(sample.input_ids) for sample in samples)
    masked = sum(
        segment.stop - segment.start
        for sample in samples
        for segment in sample.segments
        if segment.kind is SegmentKind.AMBIGUOUS
    )
    return stage.commit_shard(
        shard.path,
        partial(write_rows, rows=[token_sample_to_row(sample) for sample in samples], schema=TOKEN_SAMPLES),
        num_samples=len(samples),
        num_tokens=num_tokens,
        stats={
            "dataset": _dataset(shard),
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens - num_prompt,
            "masked_tokens": masked,
            "exactness": dict(sorted(Counter(sample.exactness.value for sample in samples).items())),
            "truth": dict(sorted(truth.items())),
        },
    )


def _rebuild(
    recipe: Recipe,
    run: RunDirectory,
    renderer: PromptRenderer,
    profiles: Mapping[tuple[str, str], ProviderProfile],
    shard: ShardRef,
    truth: Counter[str],
) -> Iterator[Reconstruction]:
    """Yield one result per completion of a shard; one that cannot be rebuilt is a result too.

    Answers with native ids are also rebuilt without them, and `truth` counts how the two compare.
    """
    prompts = _prompts(run, shard)
    asked: PromptRecord | None = None
    prompt_ids: list[int] = []
    for completion in _completions(run, shard):
        prompt = prompts.get(completion.sample_id)
        if prompt is None:
            raise CorruptShardError(
                f"completion {completion.sample_id!r} of {shard.path!r} has no prompt in the shard of that name: the "
                "stages are not of one run. Restore the run directory from a copy."
            )
        try:
            if asked is None or (asked.messages, asked.tools) != (prompt.messages, prompt.tools):
                prompt_ids = []
                prompt_ids = renderer.render_ids(prompt.messages, prompt.tools)
                asked = prompt
            rebuild = partial(
                reconstruct,
                completion,
                prompt_ids,
                renderer.grammar,
                renderer.tokenizer,
                profiles[completion.provider, completion.model],
                mode=renderer.mode,
                tools_declared=bool(prompt.tools),
            )
            result = rebuild(use_server_ids=recipe.reconstruction.use_server_ids)
            if completion.completion_token_ids:
                agreement = _agreement(rebuild)
                if agreement is not None:
                    truth[agreement.value] += 1
            yield result
        except TokenError as exc:
            yield unrebuilt(completion, prompt_ids, str(exc))


def _agreement(rebuild: Callable[..., Reconstruction]) -> Agreement | None:
    """Return how ids rebuilt from text compare with native ones; None when the text cannot be laid out."""
    try:
        return compare_with_truth(rebuild(use_server_ids=False).sample, rebuild(use_server_ids=True).sample)
    except TokenError:
        return None


def _probed(run: RunDirectory) -> Settled:
    """Return what probes settled before the answers were bought."""
    for shard in run.sealed(Stage.COMPLETIONS).shards:
        if shard.path == PROBES_NAME:
            return read_settled(verify_shard(run.stage_path(Stage.COMPLETIONS), shard))
    return {}


def _completion_shards(run: RunDirectory) -> list[ShardRef]:
    return [shard for shard in run.sealed(Stage.COMPLETIONS).shards if shard.path.endswith(".parquet")]


def _completions(run: RunDirectory, shard: ShardRef) -> Iterator[Completion]:
    """Yield the completions of a shard without their raw bodies, of which only logprobs are read."""
    table = read_table(verify_shard(run.stage_path(Stage.COMPLETIONS), shard), COMPLETIONS)
    for row in cast("list[dict[str, Any]]", table.to_pylist()):
        completion = completion_from_row({**row, "raw_body": b""})
        yield replace(completion, token_bytes=_token_bytes(row["raw_body"]))


def _token_bytes(raw_body: bytes) -> tuple[bytes, ...] | None:
    """Return the bytes of the answered tokens; nearly all replies have none, and those are not parsed."""
    if b'"bytes"' not in raw_body:
        return None
    answer = parse_reply(raw_body).answer
    return answer.token_bytes if answer is not None else None


def _prompts(run: RunDirectory, shard: ShardRef) -> dict[str, PromptRecord]:
    wanted = shard.path.removesuffix(".parquet") + ".jsonl"
    for candidate in run.sealed(Stage.PROMPTS).shards:
        if candidate.path == wanted:
            rows = read_json_lines(verify_shard(run.stage_path(Stage.PROMPTS), candidate))
            records = [prompt_from_json(row) for row in rows]
            return {record.sample_id: record for record in records}
    raise CorruptShardError(
        f"completions shard {shard.path!r} has no prompts shard {wanted!r}: the stages are not of one run. Restore the "
        "run directory from a copy."
    )


def _dataset(shard: ShardRef) -> str:
    return shard.path.partition("/")[0]


def _findings_name(shard_path: str) -> str:
    return f"{FINDINGS_FOLDER}/{shard_path.removesuffix('.parquet')}.jsonl"
