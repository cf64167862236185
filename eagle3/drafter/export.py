"""Stage 9: write the draft as each engine loads it, and prove that it is still the same draft.

One folder per engine: `config.json`, `model.safetensors`, `serve_<engine>.sh`, `README.md`. Every bundle is read
back from disk: exact names, exact shapes, values equal bit for bit, and the same drafted tokens and logits as the
checkpoint.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from eagle3.artifacts import OpenStage, RunDirectory, ShardRef, Stage, StageManifest, read_manifest, verify_shard
from eagle3.drafter.bundles import expected_tensors, refuse_unservable, sglang_config, sglang_name
from eagle3.drafter.draft_model import DraftModel, read_draft_shape
from eagle3.drafter.extra import import_torch, require_train_extra
from eagle3.drafter.serving import bundle_readme, serve_script
from eagle3.drafter.target_facts import TargetFacts, read_target_facts
from eagle3.drafter.training import CHECKPOINT_FOLDER, CONFIG_FILE, WEIGHTS_FILE, copy_weights
from eagle3.errors import ExportError
from eagle3.progress import Progress, ProgressEvent, no_progress
from eagle3.recipe import Recipe

BUNDLE_FORMAT = 1
PARITY_TOKENS = 48
PARITY_STEPS = 3


def export_draft(recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress) -> StageManifest:
    """Write and check one bundle per engine of the recipe, and seal them.

    Args:
        recipe: Section `export`, and the chain length to serve with.
        run: Holds the sealed draft, and usually its evaluation.
        target: Prepared directory of the target.
        progress: Told about every bundle.

    Returns:
        The sealed manifest; an earlier one when nothing changed.

    Raises:
        ExportError: An engine cannot run this draft, or a bundle differs from the checkpoint.
        StageDriftError: The bundles were sealed from other settings.
    """
    draft = run.sealed(Stage.DRAFT)
    evaluation = read_manifest(run.stage_path(Stage.EVALUATION))
    identity = {
        "export": recipe.export.identity(),
        "num_draft_tokens": recipe.evaluation.num_draft_tokens,
        "format": BUNDLE_FORMAT,
    }
    inputs = {draft.stage.value: draft.digest}
    if evaluation is not None:
        inputs[evaluation.stage.value] = evaluation.digest
    stage = run.open_stage(Stage.EXPORT, identity, inputs)
    if stage.manifest is not None:
        return stage.manifest
    require_train_extra("torch", "transformers", "safetensors")
    for shard in draft.shards:
        verify_shard(run.stage_path(Stage.DRAFT), shard)
    source = run.stage_path(Stage.DRAFT) / CHECKPOINT_FOLDER
    facts = read_target_facts(target)
    shards: list[ShardRef] = []
    checks: dict[str, Any] = {}
    for number, engine in enumerate(recipe.export.engines):
        written = write_bundle(stage, source, engine, facts)
        checks[engine] = check_bundle(source, stage.file(engine), engine, facts)
        texts = {
            f"serve_{engine}.sh": serve_script(engine, recipe.evaluation.num_draft_tokens),
            "README.md": bundle_readme(
                engine,
                recipe.target.name,
                json.loads((stage.file(engine) / CONFIG_FILE).read_text("utf-8")),
                evaluation.stats if evaluation is not None else {},
                recipe.evaluation.num_draft_tokens,
            ),
        }
        written += [
            stage.commit_shard(f"{engine}/{name}", partial(_write_text, text), num_samples=0)
            for name, text in texts.items()
        ]
        shards += written
        progress(
            ProgressEvent(
                stage="export", label=engine, done=number + 1, total=len(recipe.export.engines), unit="bundles"
            )
        )
    return stage.seal(shards, {"engines": list(recipe.export.engines), "checks": checks})


def write_bundle(stage: OpenStage, source: Path, engine: str, facts: TargetFacts) -> list[ShardRef]:
    """Write config and weights of one engine.

    Raises:
        ExportError: The engine cannot run this draft.
    """
    config = json.loads((source / CONFIG_FILE).read_text("utf-8"))
    refuse_unservable(config, engine)
    write_weights: Callable[[Path], None]
    if engine == "sglang":
        exported = sglang_config(config, facts.architecture, _token_ids(facts))
        write_weights = partial(_write_renamed, source / WEIGHTS_FILE)
    else:
        exported = config
        write_weights = partial(copy_weights, source / WEIGHTS_FILE)
    text = json.dumps(exported, indent=2, ensure_ascii=False) + "\n"
    return [
        stage.commit_shard(f"{engine}/{CONFIG_FILE}", partial(_write_text, text), num_samples=0),
        stage.commit_shard(f"{engine}/{WEIGHTS_FILE}", write_weights, num_samples=0),
    ]


def check_bundle(source: Path, bundle: Path, engine: str, facts: TargetFacts) -> dict[str, Any]:
    """Read a bundle back and compare it with the checkpoint it was made from.

    Args:
        source: The sealed checkpoint.
        bundle: Folder of the bundle.
        engine: `sglang` or `vllm`.
        facts: Of the target.

    Returns:
        What was compared, for the manifest.

    Raises:
        ExportError: A tensor is missing, surplus, of another shape or of another value; the config names other layers;
            or the bundle computes something else.
    """
    from safetensors.torch import load_file

    torch = import_torch()
    config = json.loads((source / CONFIG_FILE).read_text("utf-8"))
    original, exported = load_file(source / WEIGHTS_FILE), load_file(bundle / WEIGHTS_FILE)
    rename = sglang_name if engine == "sglang" else str
    wanted = {rename(name): (name, shape) for name, shape in expected_tensors(config).items()}
    missing, surplus = sorted(wanted.keys() - exported.keys()), sorted(exported.keys() - wanted.keys())
    if missing or surplus:
        raise ExportError(
            f"bundle {engine!r} lacks tensors {missing[:5]} and has unknown ones {surplus[:5]}: the engine would leave "
            "the former random and drop the latter, both silently. Delete 9-export and export again."
        )
    for name, (original_name, shape) in wanted.items():
        if list(exported[name].shape) != shape:
            raise ExportError(
                f"tensor {name!r} of bundle {engine!r} has shape {list(exported[name].shape)}, expected {shape}."
            )
        if exported[name].dtype != original[original_name].dtype or not torch.equal(
            exported[name], original[original_name]
        ):
            raise ExportError(f"tensor {name!r} of bundle {engine!r} differs from the checkpoint. Export again.")
    written = json.loads((bundle / CONFIG_FILE).read_text("utf-8"))
    expected = sglang_config(config, facts.architecture, _token_ids(facts)) if engine == "sglang" else config
    wrong = sorted(key for key in expected.keys() | written.keys() if written.get(key) != expected.get(key))
    if wrong:
        raise ExportError(
            f"config.json of bundle {engine!r} has {wrong[0]} = {written.get(wrong[0])!r}, expected "
            f"{expected.get(wrong[0])!r} (and {len(wrong) - 1} more). Delete 9-export and export again."
        )
    difference = _parity(
        DraftModel(read_draft_shape(config), original), DraftModel(read_draft_shape(written), exported)
    )
    if difference != 0.0:
        raise ExportError(
            f"bundle {engine!r} computes logits that differ from the checkpoint's by up to {difference:.3g}, expected "
            "0: a field of its config.json changes the forward pass. Delete 9-export and export again."
        )
    return {"tensors": len(wanted), "layer_ids": _written_layer_ids(written), "max_logit_difference": difference}


def _written_layer_ids(config: Mapping[str, Any]) -> list[int]:
    ids: list[int] = config.get("eagle_config", config)["eagle_aux_hidden_state_layer_ids"]
    return ids


def _parity(ours: DraftModel, theirs: DraftModel) -> float:
    """Largest difference of the logits of two drafts over seeded inputs."""
    torch = import_torch()
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(ours.weights["embed_tokens.weight"].shape[0])
    ids_T = torch.randint(0, vocabulary, (PARITY_TOKENS,), generator=generator)
    features_TK = torch.randn(PARITY_TOKENS, int(ours.weights["fc.weight"].shape[1]), generator=generator)
    with torch.inference_mode():
        drafted, logits = ours.trace(ids_T, features_TK, PARITY_STEPS)
        drafted_too, logits_too = theirs.trace(ids_T, features_TK, PARITY_STEPS)
    if not torch.equal(drafted, drafted_too):
        return float("inf")
    return float((logits - logits_too).abs().max())


def _token_ids(facts: TargetFacts) -> dict[str, Any]:
    end: int | list[int] | None = list(facts.end_ids) if len(facts.end_ids) > 1 else next(iter(facts.end_ids), None)
    return {"bos_token_id": facts.bos_id, "eos_token_id": end}


def _write_renamed(weights: Path, path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {sglang_name(name): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
