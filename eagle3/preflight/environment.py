"""Checks of the machine: what the stages to be made need beside the recipe. Cheap; nothing heavy is imported."""

import importlib.util
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from eagle3.artifacts import RunDirectory, Stage, read_manifest
from eagle3.recipe import Dataset, OpenRouter, Recipe, Simulator
from eagle3.tokens.checklist import Recorder, require
from eagle3.tokens.tokenizer import read_json_file

EXTRAS: dict[Stage, tuple[str, ...]] = {
    Stage.HIDDEN_STATES: ("torch", "transformers", "safetensors"),
    Stage.DRAFT: ("torch", "transformers", "speculators"),
    Stage.EVALUATION: ("torch", "transformers"),
    Stage.EXPORT: ("torch", "safetensors"),
}
"""Packages that a stage imports and the base install does not bring."""
NUM_LAYER_SLOTS = 4
"""Three captured layers and the final one, unless the recipe names others."""
BYTES_OF = {"bfloat16": 2, "float32": 4}
ANSWER_SHARE = 0.5
"""Expected length of an answer as a share of `max_tokens`, as long as nothing is known."""
PROMPT_TOKENS = 200
"""Expected length of a prompt."""
GB = 1_000_000_000


def check_environment(
    recipe: Recipe, run: RunDirectory, target: Path, stages: Sequence[Stage], recorder: Recorder
) -> None:
    """Make the checks E1 to E5 for the stages that are to be made."""
    _check_extras(stages, recorder)
    counts: dict[str, int] = {}
    if Stage.PROMPTS in stages:
        counts = _check_datasets(recipe, recorder)
    if Stage.COMPLETIONS in stages:
        _check_key(recipe, recorder)
        _check_rehearsal(recipe, recorder)
    if Stage.HIDDEN_STATES in stages:
        _check_disk(recipe, run, target, counts, recorder)


def _check_extras(stages: Sequence[Stage], recorder: Recorder) -> None:
    """E1: packages that later stages need are installed before money is spent."""
    wanted = {name: stage for stage in stages for name in EXTRAS.get(stage, ())}
    if not wanted:
        recorder.skip("E1", "optional packages", "the stages to be made need none")
        return
    advice = "Install them: pip install 'eagle3-pipeline[train]', then requirements-no-deps.txt with --no-deps."
    with recorder.check("E1", "optional packages", advice) as note:
        missing = [name for name in wanted if importlib.util.find_spec(name) is None]
        needing = sorted({wanted[name].command for name in missing})
        require(not missing, f"{missing} are not installed; 'eagle3 {needing[0] if needing else ''}' needs them.")
        note(", ".join(sorted(wanted)))


def _check_datasets(recipe: Recipe, recorder: Recorder) -> dict[str, int]:
    """E2: prompt files are there and start as prompt files do; returns the lines of each."""
    counts: dict[str, int] = {}
    for dataset in recipe.prompts.datasets:
        path = recipe.resolve(dataset.path)
        with recorder.check("E2", f"prompts of {dataset.name!r}", "Check the dataset's path in the recipe.") as note:
            require(path.is_file(), f"{str(dataset.path)!r} is no file.")
            require(os.access(path, os.R_OK), f"{str(dataset.path)!r} cannot be read by this user.")
            require(path.stat().st_size, f"{str(dataset.path)!r} is empty.")
            if path.suffix != ".jsonl":
                note("there; its content is read by 'eagle3 prompts'")
                continue
            with path.open("rb") as file:
                first = file.readline()
            require(_is_object(first), f"{str(dataset.path)!r}: the first line is no JSON object: {first[:60]!r}.")
            counts[dataset.name] = _count_lines(path, dataset)
            note(f"{counts[dataset.name]} samples to ask for, at most")
    return counts


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _count_lines(path: Path, dataset: Dataset) -> int:
    with path.open("rb") as file:
        lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    return min(max(lines, 1), dataset.max_samples or max(lines, 1)) * dataset.replicas


def _check_key(recipe: Recipe, recorder: Recorder) -> None:
    """E3: there is a key where the recipe says; whether it is accepted only the service can tell."""
    provider = recipe.generation.provider
    name = provider.api_key_env if not isinstance(provider, Simulator) else None
    if name is None:
        recorder.skip("E3", "API key", f"a provider of kind {provider.kind!r} needs none here")
        return
    with recorder.check("E3", "API key", f"Set {name}, or name another variable in api_key_env.") as note:
        require(os.environ.get(name, "").strip(), f"environment variable {name!r} is not set or empty.")
        note(f"{name} is set")


def _check_rehearsal(recipe: Recipe, recorder: Recorder) -> None:
    """E4: files of a rehearsal are there."""
    provider = recipe.generation.provider
    if not isinstance(provider, Simulator):
        if isinstance(provider, OpenRouter) and provider.routing.ignore and provider.routing.only:
            both = sorted(set(provider.routing.ignore) & set(provider.routing.only))
            if both:
                recorder.warn("E4", "routing", f"{both} are in `only` and in `ignore`.", "Remove them from one.")
        return
    with recorder.check("E4", "rehearsal files", "Check scenario and answers in the recipe.") as note:
        missing = [str(path) for path in (provider.scenario, *provider.answers) if not recipe.resolve(path).is_file()]
        require(not missing, f"{missing[:5]} are no files.")
        note(f"scenario and {len(provider.answers)} answer files")


def _check_disk(recipe: Recipe, run: RunDirectory, target: Path, counts: dict[str, int], recorder: Recorder) -> None:
    """E5: hidden states of the expected corpus fit the disk."""
    config = read_json_file(target / "config.json")
    hidden_size = (config.get("text_config") or config).get("hidden_size")
    if read_manifest(run.stage_path(Stage.HIDDEN_STATES)) is not None:
        recorder.skip("E5", "disk for hidden states", "they are there already")
        return
    if not isinstance(hidden_size, int) or not counts:
        recorder.skip("E5", "disk for hidden states", "config.json names no hidden_size, or no prompts are counted")
        return
    settings = recipe.hidden_states
    num_slots = NUM_LAYER_SLOTS if settings.layer_ids is None else len(settings.layer_ids) + 1
    bytes_per_token = num_slots * hidden_size * BYTES_OF[settings.dtype]
    expected = worst = 0
    for dataset in recipe.prompts.datasets:
        length = PROMPT_TOKENS + round(ANSWER_SHARE * dataset.sampling.max_tokens)
        expected += counts.get(dataset.name, 0) * min(length, recipe.corpus.max_sample_tokens)
        worst += counts.get(dataset.name, 0) * recipe.corpus.max_sample_tokens
    place = next(folder for folder in (run.path, *run.path.parents) if folder.is_dir())
    free = shutil.disk_usage(place).free - settings.disk_reserve_bytes
    sizes = (
        f"about {expected * bytes_per_token / GB:.2f} GB are expected, at most {worst * bytes_per_token / GB:.2f} GB, "
        f"{free / GB:.2f} GB are free beside the reserve"
    )
    advice = "Use another run root, fewer prompts, or a smaller corpus.max_sample_tokens."
    with recorder.check("E5", "disk for hidden states", advice) as note:
        require(expected * bytes_per_token <= free, f"{sizes}.")
        note(sizes)
    if expected * bytes_per_token <= free < worst * bytes_per_token:
        recorder.warn("E5", "disk for hidden states", f"{sizes}.", "Long answers may not fit.")
