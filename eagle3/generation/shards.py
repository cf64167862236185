"""From the journal to the sealed stage: completions as Parquet in prompt order, failures as JSON Lines."""

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path

from pydantic_core import to_json

from eagle3.artifacts import OpenStage, RunDirectory, ShardRef, Stage, StageManifest, verify_shard
from eagle3.errors import ArtifactError
from eagle3.formats import COMPLETIONS, completion_to_row, prompt_from_json, read_json_lines, write_rows
from eagle3.generation.history import History
from eagle3.generation.journal_lines import JournalReader, raw_of
from eagle3.providers.wire import parse_reply
from eagle3.recipe import Recipe
from eagle3.records import Completion, FailedCompletion, FailureClass, JsonObject, PromptRecord, Usage, canonical_json

FAILED_NAME = "failed.jsonl"
ENDPOINTS_NAME = "endpoints.json"
PLAN_NAME = "plan.json"
STATE_NAME = "simulator-state.json"
"""Where a look-alike of this run keeps its account and cache."""

TOKENS_BEYOND_TEXT = 256
"""Room in the bound of prompt tokens for what a chat template adds of itself, such as a default system message."""
COUNTED_SHARE = 1.05
COUNTED_EXTRA_TOKENS = 64
"""Room beside a counted prompt: providers may render another template."""


def open_completions(recipe: Recipe, run: RunDirectory) -> OpenStage:
    """Open the completions stage for this recipe.

    Raises:
        StageMissingError: The prompts were not sealed.
        StageDriftError: It was sealed from other settings.
    """
    generation = recipe.generation
    identity = {
        "provider": generation.provider.identity(),
        "sampling": {dataset.name: dataset.sampling.identity() for dataset in recipe.prompts.datasets},
    }
    return run.open_stage(Stage.COMPLETIONS, identity, {Stage.PROMPTS.value: run.sealed(Stage.PROMPTS).digest})


def prompt_shards(manifest: StageManifest) -> list[ShardRef]:
    """Return the shards of the prompts stage that hold prompts, in order; records of dropped prompts are left out."""
    return [shard for shard in manifest.shards if Path(shard.path).name.startswith("shard-")]


def num_prompts(recipe: Recipe, manifest: StageManifest) -> dict[str, int]:
    """Return the samples of each dataset of the recipe."""
    totals = {dataset.name: 0 for dataset in recipe.prompts.datasets}
    for shard in prompt_shards(manifest):
        totals[Path(shard.path).parent.name] += shard.num_samples
    return totals


def read_prompts(run: RunDirectory, shard: ShardRef) -> tuple[list[PromptRecord], list[int]]:
    """Return the prompts of a sealed shard, and for each the most prompt tokens it can have.

    The bound is the count that the prompts stage wrote, with room for what a provider's own template adds. Without a
    count it is the length of the conversation as JSON in UTF-8 bytes: a byte-level tokenizer makes no more tokens than
    there are bytes.
    """
    path = verify_shard(run.stage_path(Stage.PROMPTS), shard)
    prompts: list[PromptRecord] = []
    bounds: list[int] = []
    for values in read_json_lines(path):
        exact: int | None = values.pop("num_prompt_tokens", None)
        prompt = prompt_from_json(values)
        prompts.append(prompt)
        bounds.append(counted_bound(exact) if exact is not None else prompt_token_bound(prompt))
    return prompts, bounds


def counted_bound(num_prompt_tokens: int) -> int:
    """Return the most tokens that a prompt of this counted length is billed as.

    Recorded providers bill the template's count exactly; some add a few tokens around tools.
    """
    return math.ceil(num_prompt_tokens * COUNTED_SHARE) + COUNTED_EXTRA_TOKENS


def prompt_token_bound(prompt: PromptRecord) -> int:
    """Return a number of tokens that the rendered prompt cannot exceed."""
    return len(to_json([prompt.messages, prompt.tools])) + TOKENS_BEYOND_TEXT


def completion_from_entry(dataset: str, entry: JsonObject, quantizations: Mapping[str, str | None]) -> Completion:
    """Return the completion that an `answer` entry of the journal holds.

    Args:
        dataset: Whose journal it is.
        entry: As journaled.
        quantizations: By provider name, as listed in the snapshots.

    Raises:
        ArtifactError: The raw reply is no answer, so the entry was not written by this code.
    """
    raw = raw_of(entry)
    parsed = parse_reply(raw)
    answer = parsed.answer
    if answer is None or answer.finish_reason is None:
        message = (
            f"the journaled reply of sample {entry['id']!r} is no answer ({parsed.kind.value}): restore the journal."
        )
        raise ArtifactError(message)
    provider: str = entry["provider"]
    return Completion(
        sample_id=entry["id"],
        dataset=dataset,
        reasoning=answer.reasoning,
        content=answer.content,
        tool_calls=answer.tool_calls,
        finish_reason=answer.finish_reason,
        native_finish_reason=answer.native_finish_reason,
        provider=provider,
        model=answer.model or "",
        quantization=quantizations.get(provider),
        generation_id=entry["generation_id"],
        usage=Usage(**entry["usage"]),
        cost_usd=Decimal(entry["cost_usd"]),
        cost_is_estimated=entry["is_estimated"],
        prompt_token_ids=answer.prompt_token_ids,
        completion_token_ids=answer.completion_token_ids,
        latency_s=entry["latency_s"],
        attempts=entry["attempts"],
        from_cache=entry["from_cache"],
        raw_body=raw,
    )


def shard_name(prompt_shard: ShardRef) -> str:
    """Return the name of the completions shard that answers a prompt shard."""
    return str(Path(prompt_shard.path).with_suffix(".parquet"))


def finished_shard(
    stage: OpenStage, prompt_shard: ShardRef, prompts: Sequence[PromptRecord], history: History
) -> ShardRef | None:
    """Return the shard when nothing more is to be asked for it, and its file says what the journal says."""
    if not all(history.sample(prompt.sample_id).is_final for prompt in prompts):
        return None
    return written_shard(stage, prompt_shard, prompts, history)


def written_shard(
    stage: OpenStage, prompt_shard: ShardRef, prompts: Sequence[PromptRecord], history: History
) -> ShardRef | None:
    """Return the shard when its file holds all answers there are; samples that a token budget left out have none."""
    found = stage.existing_shard(shard_name(prompt_shard))
    if found is None:
        return None
    answered = sum(history.sample(prompt.sample_id).answer is not None for prompt in prompts)
    return found if found.num_samples == answered else None


def write_shard(
    stage: OpenStage,
    prompt_shard: ShardRef,
    prompts: Sequence[PromptRecord],
    history: History,
    quantizations: Mapping[str, str | None],
) -> ShardRef:
    """Write the completions of a shard whose samples are all final."""
    completions: list[Completion] = []
    with JournalReader() as reader:
        for prompt in prompts:
            place = history.sample(prompt.sample_id).answer
            if place is not None:
                completions.append(completion_from_entry(prompt.dataset, reader.read(place), quantizations))
    cost_usd = sum((completion.cost_usd for completion in completions), Decimal(0))
    return stage.commit_shard(
        shard_name(prompt_shard),
        lambda path: write_rows(path, map(completion_to_row, completions), COMPLETIONS),
        num_samples=len(completions),
        num_tokens=sum(completion.usage.completion_tokens for completion in completions),
        stats={
            "dataset": prompts[0].dataset if prompts else Path(prompt_shard.path).parent.name,
            "failed": len(prompts) - len(completions),
            "cost_usd": f"{cost_usd:f}",
        },
    )


def write_failures(stage: OpenStage, history: History) -> ShardRef:
    """Write the samples that ended without an answer, ordered by dataset and id."""
    found = [sample.failure for sample in history.samples.values() if sample.failure is not None]
    failures = sorted(found, key=lambda failure: (failure.dataset, failure.sample_id))
    lines = "".join(canonical_json(_failure_json(failure)) + "\n" for failure in failures)
    return stage.commit_shard(
        FAILED_NAME, lambda path: _write_text(path, lines), num_samples=len(failures), stats={"kind": "failed"}
    )


def read_failures(path: Path) -> list[FailedCompletion]:
    """Read the failures of a sealed stage."""
    with path.open(encoding="utf-8") as file:
        values = [json.loads(line) for line in file]
    return [
        FailedCompletion(
            sample_id=value["sample_id"],
            dataset=value["dataset"],
            failure=FailureClass(value["failure"]),
            message=value["message"],
            attempts=value["attempts"],
        )
        for value in values
    ]


def _failure_json(failure: FailedCompletion) -> JsonObject:
    return {
        "sample_id": failure.sample_id,
        "dataset": failure.dataset,
        "failure": failure.failure.value,
        "message": failure.message,
        "attempts": failure.attempts,
    }


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
