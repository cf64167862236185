"""Driver of the corpus stage: token samples, the audit's verdicts and the prompts in; shuffled Parquet out.

Files: `5-corpus/{train,validation}/shard-00000.parquet`, schema `eagle3.formats.CORPUS`, whose metadata also names the
tokenizer digest. Two passes over the token samples: the first reads a few narrow columns and decides, the second moves
the chosen rows. Equal inputs give equal bytes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter

from eagle3.artifacts import OpenStage, RunDirectory, ShardRef, Stage, StageManifest, verify_shard
from eagle3.corpus.selection import Candidate, Selection, select
from eagle3.errors import CorruptShardError, InputError
from eagle3.formats import CORPUS, TOKEN_SAMPLES, prompt_from_json, read_json_lines, read_table, write_table
from eagle3.progress import Progress, ProgressEvent, no_progress
from eagle3.recipe import Recipe
from eagle3.records import AuditReport, Exactness, canonical_json, sha256_text
from eagle3.tokens.grammar import grammar_of
from eagle3.tokens.tokenizer import load_tokenizer

AUDIT_REPORT_NAME = "report.json"
TOKENIZER_DIGEST_KEY = "eagle3.tokenizer_digest"
"""Schema metadata of corpus shards: which tokenizer the ids belong to."""
SPLITS = ("train", "validation")
_REPORT = TypeAdapter(AuditReport)


def assemble_corpus(recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress) -> StageManifest:
    """Merge the audited samples of all datasets into a shuffled corpus with a held-out split, and seal it.

    Args:
        recipe: Limits, split size and seed.
        run: Holds the sealed prompts, token samples and audit.
        target: Prepared directory of the target model; its tokenizer digest goes into the files.
        progress: Told about every shard read and written.

    Returns:
        The sealed manifest; an earlier one when nothing changed.

    Raises:
        InputError: No sample is left, or none can be held out.
        StageMissingError: An earlier stage is not complete.
        CorruptShardError: A file of an earlier stage changed, or a sample occurs twice.
        StageDriftError: The corpus was sealed from other settings.
    """
    prompts, samples, audit = (run.sealed(stage) for stage in (Stage.PROMPTS, Stage.TOKEN_SAMPLES, Stage.AUDIT))
    tokenizer = load_tokenizer(target, grammar_of(recipe))
    inputs = {manifest.stage.value: manifest.digest for manifest in (prompts, samples, audit)}
    stage = run.open_stage(
        Stage.CORPUS,
        {"corpus": recipe.corpus.identity(), "seed": recipe.seed},
        {**inputs, "tokenizer": tokenizer.digest},
    )
    if stage.manifest is not None:
        return stage.manifest

    paths = [
        verify_shard(run.stage_path(samples.stage), shard)
        for shard in samples.shards
        if shard.path.endswith(".parquet")
    ]
    candidates = _candidates(paths, _prompt_keys(run, prompts), progress)
    selection = select(candidates, recipe.corpus, _dropped(run, audit), recipe.seed)
    _check(selection, candidates, recipe)
    schema = CORPUS.with_metadata({**(CORPUS.metadata or {}), TOKENIZER_DIGEST_KEY: tokenizer.digest})
    rows = _rows(paths, {*selection.train, *selection.validation}, schema)
    shards: list[ShardRef] = []
    for split, sample_ids in zip(SPLITS, (selection.train, selection.validation), strict=True):
        shards += _commit_split(
            stage, split, sample_ids, rows, shard_samples=recipe.corpus.shard_samples, progress=progress
        )
    return stage.seal(shards, corpus_stats(candidates, selection, [shard.sha256 for shard in shards]))


def corpus_stats(candidates: Sequence[Candidate], selection: Selection, shard_digests: Sequence[str]) -> dict[str, Any]:
    """Return the figures for the manifest: samples and tokens per split, per dataset, and what was left out and why."""
    by_id = {candidate.sample_id: candidate for candidate in candidates}
    splits = {
        "train": [by_id[sample_id] for sample_id in selection.train],
        "validation": [by_id[sample_id] for sample_id in selection.validation],
    }
    datasets = sorted({candidate.dataset for candidate in candidates})
    reasons = {
        name: Counter(reason for sample_id, reason in selection.left_out.items() if by_id[sample_id].dataset == name)
        for name in datasets
    }
    return {
        **{split: _counts(chosen) for split, chosen in splits.items()},
        "left_out": dict(sorted(Counter(selection.left_out.values()).items())),
        "by_dataset": {
            name: {
                **{
                    split: _counts([each for each in chosen if each.dataset == name])
                    for split, chosen in splits.items()
                },
                "left_out": dict(sorted(reasons[name].items())),
            }
            for name in datasets
        },
        "corpus_digest": sha256_text("\n".join(shard_digests)),
    }


def _counts(chosen: Sequence[Candidate]) -> dict[str, int]:
    return {
        "samples": len(chosen),
        "tokens": sum(each.num_tokens for each in chosen),
        "completion_tokens": sum(each.num_completion_tokens for each in chosen),
    }


def _prompt_keys(run: RunDirectory, prompts: StageManifest) -> dict[str, str]:
    """Return the digest of the canonical messages of every sample."""
    keys: dict[str, str] = {}
    for shard in prompts.shards:
        if "/" not in shard.path:
            continue
        for row in read_json_lines(verify_shard(run.stage_path(prompts.stage), shard)):
            record = prompt_from_json(row)
            keys[record.sample_id] = sha256_text(canonical_json(list(record.messages)))
    return keys


def _dropped(run: RunDirectory, audit: StageManifest) -> Mapping[str, str]:
    report = next(shard for shard in audit.shards if shard.path == AUDIT_REPORT_NAME)
    return _REPORT.validate_json(verify_shard(run.stage_path(audit.stage), report).read_bytes()).dropped


def _candidates(paths: Sequence[Path], prompt_keys: Mapping[str, str], progress: Progress) -> list[Candidate]:
    candidates: list[Candidate] = []
    columns = ["sample_id", "dataset", "input_ids", "num_prompt_tokens", "exactness"]
    for done, path in enumerate(paths, start=1):
        table = read_table(path, TOKEN_SAMPLES, columns)
        lengths = cast("list[int]", pc.list_value_length(table["input_ids"]).to_pylist())  # pyright: ignore[reportAttributeAccessIssue] - compute functions are made at import time
        for row, num_tokens in zip(table.drop_columns(["input_ids"]).to_pylist(), lengths, strict=True):
            sample_id = cast("str", row["sample_id"])
            if sample_id not in prompt_keys:
                raise CorruptShardError(
                    f"sample {sample_id!r} in {path.name!r} has no prompt in {Stage.PROMPTS.value!r}: the two stages "
                    f"are not of one run. Delete {Stage.TOKEN_SAMPLES.value!r} and run 'eagle3 reconstruct' again."
                )
            candidates.append(
                Candidate(
                    sample_id=sample_id,
                    dataset=row["dataset"],
                    prompt_key=prompt_keys[sample_id],
                    num_tokens=num_tokens,
                    num_completion_tokens=num_tokens - row["num_prompt_tokens"],
                    exactness=Exactness(row["exactness"]),
                )
            )
        progress(ProgressEvent(stage="corpus", label="read", done=done, total=len(paths), unit="shards"))
    twice = [sample_id for sample_id, count in Counter(each.sample_id for each in candidates).items() if count > 1]
    if twice:
        raise CorruptShardError(
            f"{len(twice)} samples occur twice in {Stage.TOKEN_SAMPLES.value!r}: {twice[:5]}. Delete that folder and "
            "run 'eagle3 reconstruct' again."
        )
    return candidates


def _check(selection: Selection, candidates: Sequence[Candidate], recipe: Recipe) -> None:
    reasons = dict(Counter(selection.left_out.values()).most_common(5))
    if not selection.train and not selection.validation:
        raise InputError(
            f"the corpus would be empty: all {len(candidates)} samples are left out, by reason {reasons}. Read the "
            "audit report, or loosen the recipe's corpus section."
        )
    if not selection.validation:
        raise InputError(
            f"nothing can be held out for validation from {len(selection.train)} samples (left out: {reasons}): the "
            f"split needs two different prompts, and all answers to one prompt within corpus.validation_samples = "
            f"{recipe.corpus.validation_samples}. Add prompts or raise that number."
        )


def _rows(paths: Sequence[Path], chosen: set[str], schema: pa.Schema) -> pa.Table:
    """Return the chosen rows of all shards in one table, in the columns of the corpus."""
    tables: list[pa.Table] = []
    wanted = pa.array(sorted(chosen), type=pa.string())
    for path in paths:
        table = read_table(path, TOKEN_SAMPLES, schema.names)
        mask = pc.is_in(table["sample_id"], value_set=wanted)  # pyright: ignore[reportAttributeAccessIssue] - see above
        table = table.filter(mask)
        tables.append(pa.Table.from_arrays([table[name] for name in schema.names], schema=schema))
    return pa.concat_tables(tables)


def _commit_split(
    stage: OpenStage,
    split: str,
    sample_ids: Sequence[str],
    rows: pa.Table,
    *,
    shard_samples: int,
    progress: Progress,
) -> list[ShardRef]:
    place = {sample_id: index for index, sample_id in enumerate(cast("list[str]", rows["sample_id"].to_pylist()))}
    shards: list[ShardRef] = []
    starts = range(0, len(sample_ids), shard_samples)
    for number, start in enumerate(starts):
        name = f"{split}/shard-{number:05d}.parquet"
        chunk = sample_ids[start : start + shard_samples]
        shard = stage.existing_shard(name)
        if shard is None:
            table = rows.take(pa.array([place[sample_id] for sample_id in chunk]))
            num_tokens = cast("int", pc.sum(pc.list_value_length(table["input_ids"])).as_py())  # pyright: ignore[reportAttributeAccessIssue] - see above
            shard = stage.commit_shard(
                name,
                partial(write_table, table=table),
                num_samples=len(chunk),
                num_tokens=num_tokens,
                stats={"split": split},
            )
        shards.append(shard)
        progress(ProgressEvent(stage="corpus", label=split, done=number + 1, total=len(starts), unit="shards"))
    return shards
