"""Driver of the prompts stage: files in, shards of prompt records and a list of dropped prompts out.

Files: `1-prompts/<dataset>/shard-00000.jsonl` in file order, the replicas of a prompt side by side, each line with
`num_prompt_tokens`, the length of the rendered prompt, and
`1-prompts/dropped.jsonl`, one line per prompt that is not asked, with the reason.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3.artifacts import OpenStage, RunDirectory, ShardRef, Stage, StageManifest, sha256_file
from eagle3.errors import InputError, TemplateError
from eagle3.formats import prompt_to_json, write_json_lines
from eagle3.progress import Progress, ProgressEvent, no_progress
from eagle3.prompts.reading import Conversation, read_conversations
from eagle3.prompts.screening import Drop, DropReason, literal_pattern, screen
from eagle3.recipe import Dataset, Recipe
from eagle3.records import PromptRecord, sample_id_of
from eagle3.tokens.rendering import open_renderer

DROPPED_NAME = "dropped.jsonl"
PROGRESS_STEP = 100
"""Prompts between two progress events."""


@dataclass(slots=True)
class SelectedPrompts:
    """What one dataset asks, and what it leaves out."""

    records: list[PromptRecord] = field(default_factory=list[PromptRecord])
    prompt_tokens: list[int] = field(default_factory=list[int])
    """Per record."""
    drops: list[Drop] = field(default_factory=list[Drop])
    ignored_keys: set[str] = field(default_factory=set[str])

    def stats(self) -> dict[str, Any]:
        """Return the figures of this dataset for the manifest."""
        return {
            "prompts": sum(record.replica == 0 for record in self.records),
            "samples": len(self.records),
            "dropped": len(self.drops),
            "dropped_by_reason": dict(sorted(Counter(drop.reason.value for drop in self.drops).items())),
            "prompt_tokens": sum(self.prompt_tokens),
            "longest_prompt_tokens": max(self.prompt_tokens, default=0),
            "ignored_keys": sorted(self.ignored_keys),
        }


def prepare_prompts(recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress) -> StageManifest:
    """Read the recipe's prompt files and seal the prompts to ask.

    A prompt that must not be asked is dropped before anything is spent, counted in the manifest's stats, and listed
    with its reason in `dropped.jsonl`.

    Args:
        recipe: Names the prompt files.
        run: Where the stage goes.
        target: Prepared directory of the target model; its tokenizer and chat template count the prompt tokens.
        progress: Told about every 100 prompts.

    Returns:
        The sealed manifest; an earlier one when nothing changed.

    Raises:
        InputError: A prompt file is missing, empty, has a wrong shape, or leaves nothing to ask.
        StageDriftError: The stage was sealed from other prompts or settings.
    """
    renderer = open_renderer(recipe, target)
    paths = {dataset.name: recipe.resolve(dataset.path) for dataset in recipe.prompts.datasets}
    stage = run.open_stage(Stage.PROMPTS, _identity(recipe), _inputs(paths, target, renderer.grammar.tokenizer.file))
    if stage.manifest is not None:
        return stage.manifest

    special = (
        literal_pattern(renderer.tokenizer.control_literals) if recipe.prompts.special_literals == "drop" else None
    )
    shards: list[ShardRef] = []
    drops: list[Drop] = []
    stats: dict[str, Any] = {}
    for dataset in recipe.prompts.datasets:
        selected = select_prompts(
            dataset,
            read_conversations(paths[dataset.name]),
            screen=partial(screen, special=special),
            count_tokens=lambda conversation: len(renderer.render_ids(conversation.messages, conversation.tools)),
            progress=progress,
        )
        if not selected.records:
            raise InputError(_nothing_left(dataset, paths[dataset.name], selected))
        shards += _commit_shards(stage, dataset.name, selected, recipe.prompts.shard_samples)
        drops += selected.drops
        stats[dataset.name] = selected.stats()
    shards.append(
        stage.commit_shard(
            DROPPED_NAME,
            lambda path: write_json_lines(path, map(asdict, drops)),
            num_samples=len(drops),
            stats={"role": "dropped"},
        )
    )
    return stage.seal(shards, {"datasets": stats})


def select_prompts(
    dataset: Dataset,
    conversations: Iterable[Conversation],
    *,
    screen: Callable[[Conversation], tuple[DropReason, str] | None],
    count_tokens: Callable[[Conversation], int],
    progress: Progress = no_progress,
) -> SelectedPrompts:
    """Choose what a dataset asks: the first `max_samples` usable, distinct conversations, in file order.

    Of equal conversations the first is kept, whatever their ids are.

    Args:
        dataset: Gives name, cap and replicas.
        conversations: In file order; no more are read than needed.
        screen: Says why a conversation must not be asked, or None.
        count_tokens: Renders a conversation and counts its ids; may raise `TemplateError`.
        progress: Told about every 100 conversations.
    """
    selected = SelectedPrompts()
    first_lines: dict[str, int] = {}
    for seen, conversation in enumerate(conversations, start=1):
        if dataset.max_samples is not None and len(first_lines) >= dataset.max_samples:
            break
        selected.ignored_keys |= conversation.ignored_keys
        problem = screen(conversation)
        num_tokens = 0
        if problem is None and conversation.key in first_lines:
            problem = DropReason.DUPLICATE, f"the same conversation as line {first_lines[conversation.key]}"
        if problem is None:
            try:
                num_tokens = count_tokens(conversation)
            except TemplateError as exc:
                problem = DropReason.TEMPLATE, str(exc)
        if problem is not None:
            selected.drops.append(_drop(dataset.name, conversation, *problem))
        else:
            first_lines[conversation.key] = conversation.line
            selected.records += _replicas(dataset, conversation)
            selected.prompt_tokens += [num_tokens] * dataset.replicas
        if seen % PROGRESS_STEP == 0:
            progress(ProgressEvent(stage="prompts", label=dataset.name, done=seen, total=0, unit="prompts"))
    kept = len(first_lines)
    progress(ProgressEvent(stage="prompts", label=dataset.name, done=kept, total=kept, unit="prompts"))
    return selected


def _replicas(dataset: Dataset, conversation: Conversation) -> list[PromptRecord]:
    return [
        PromptRecord(
            sample_id=sample_id_of(dataset.name, conversation.messages, conversation.tools, replica),
            dataset=dataset.name,
            prompt_id=conversation.prompt_id,
            messages=conversation.messages,
            tools=conversation.tools,
            replica=replica,
        )
        for replica in range(dataset.replicas)
    ]


def _drop(dataset: str, conversation: Conversation, reason: DropReason, detail: str) -> Drop:
    return Drop(dataset=dataset, line=conversation.line, prompt_id=conversation.prompt_id, reason=reason, detail=detail)


def _commit_shards(stage: OpenStage, dataset: str, selected: SelectedPrompts, shard_samples: int) -> list[ShardRef]:
    shards: list[ShardRef] = []
    rows = list(zip(selected.records, selected.prompt_tokens, strict=True))
    for number, start in enumerate(range(0, len(rows), shard_samples)):
        chunk = rows[start : start + shard_samples]
        records: Sequence[Mapping[str, Any]] = [
            {**prompt_to_json(record), "num_prompt_tokens": num_tokens} for record, num_tokens in chunk
        ]
        shards.append(
            stage.commit_shard(
                f"{dataset}/shard-{number:05d}.jsonl",
                partial(write_json_lines, rows=records),
                num_samples=len(chunk),
                stats={"dataset": dataset, "prompt_tokens": sum(num_tokens for _, num_tokens in chunk)},
            )
        )
    return shards


def _identity(recipe: Recipe) -> dict[str, Any]:
    # The grammar is left out on purpose: it says how answers are read, and correcting it must not buy them again.
    return {
        "prompts": recipe.prompts.identity(),
        "mode": recipe.target.mode,
        "template_options": dict(recipe.target.template_options),
    }


def _inputs(paths: Mapping[str, Path], target: Path, vocabulary: str) -> dict[str, str]:
    for name, path in paths.items():
        if not path.is_file():
            raise InputError(
                f"prompt file {path.name!r} of dataset {name!r} is missing. Check its `path` in the recipe; relative "
                "paths start at the recipe file."
            )
    template = target / "chat_template.jinja"
    digests = {f"dataset:{name}": sha256_file(path) for name, path in paths.items()}
    return {
        **digests,
        "tokenizer": sha256_file(target / vocabulary),
        "chat_template": sha256_file(template if template.is_file() else target / "tokenizer_config.json"),
    }


def _nothing_left(dataset: Dataset, path: Path, selected: SelectedPrompts) -> str:
    examples = [f"line {drop.line}: {drop.detail}" for drop in islice(selected.drops, 5)]
    return (
        f"prompt file {path.name!r} of dataset {dataset.name!r} leaves nothing to ask: all {len(selected.drops)} "
        "prompts were dropped. The first: " + "; ".join(examples)
    )
