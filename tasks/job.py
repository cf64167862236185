"""What one flow run works on: a small JSON value that tasks can be given, and the things it stands for."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3.artifacts import RunDirectory, Stage, StageManifest, read_manifest, sha256_file
from eagle3.recipe import Recipe, load_recipe
from eagle3.tokens.grammar import grammar_of

TARGET_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "tiktoken.model", "chat_template.jinja")
"""What shapes ids and states besides the weights, which the stages that load them check themselves."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe and the folder that holds its runs."""

    recipe_path: str
    overrides: tuple[str, ...] = ()
    run_root: str = "runs"
    home: str = ".eagle3"
    """Where converted targets are kept."""

    @cached_property
    def recipe(self) -> Recipe:
        """The checked recipe."""
        return load_recipe(Path(self.recipe_path), self.overrides)

    @cached_property
    def run(self) -> RunDirectory:
        """The run directory of this recipe."""
        return RunDirectory((Path(self.run_root) / self.recipe.run_name).resolve())

    def file_digests(self, target: Path | None) -> dict[str, str]:
        """Return the digests of the small files a run reads from outside: prompts, grammar, tokenizer, template."""
        digests = {
            dataset.name: sha256_file(path)
            for dataset in self.recipe.prompts.datasets
            if (path := self.recipe.resolve(dataset.path)).is_file()
        }
        digests["grammar"] = grammar_of(self.recipe).digest
        for name in TARGET_FILES:
            if target is not None and (target / name).is_file():
                digests[name] = sha256_file(target / name)
        return digests


@dataclass(frozen=True, kw_only=True)
class StageRef:
    """What a stage task returns: a small JSON reference, never data."""

    stage: str
    digest: str
    """Digest of the sealed manifest: equal digests mean equal bytes."""
    num_samples: int
    stats: dict[str, Any]

    @staticmethod
    def of(manifest: StageManifest) -> "StageRef":
        """Return the reference of a sealed stage."""
        small = {key: value for key, value in manifest.stats.items() if isinstance(value, (str, int, float, bool))}
        return StageRef(
            stage=manifest.stage.value,
            digest=manifest.digest,
            num_samples=sum(shard.num_samples for shard in manifest.shards),
            stats=small,
        )

    def is_current(self, run: RunDirectory) -> bool:
        """Tell whether the sealed stage on disk is still the one this reference names."""
        manifest = read_manifest(run.stage_path(Stage(self.stage)))
        return manifest is not None and manifest.digest == self.digest
