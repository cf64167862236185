import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3.artifacts import RunDirectory, Stage, verify_shard
from eagle3.errors import ConfigurationError, CorruptShardError, GateError, RecipeError, StageDriftError, TargetError
from eagle3.hidden_states import extract_hidden_states
from eagle3.hidden_states.plan import gate_rows
from eagle3.hidden_states.reading import CorpusRow, check_ids
from eagle3.hidden_states.store import read_states
from eagle3.progress import ProgressEvent
from eagle3.recipe import Recipe


def with_settings(recipe: Recipe, **values: Any) -> Recipe:
    return recipe.model_copy(update={"hidden_states": recipe.hidden_states.model_copy(update=values)})


def test_every_row_in_order(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    events: list[ProgressEvent] = []
    manifest = extract_hidden_states(recipe, run, answering_target.directory, events.append)
    rows = answering_target.rows
    assert [shard.path for shard in manifest.shards] == [f"hs_{row}.safetensors" for row in range(len(rows))]
    for row, shard in enumerate(manifest.shards):
        stored = read_states(verify_shard(run.stage_path(Stage.HIDDEN_STATES), shard))
        assert stored.token_ids == list(rows[row].input_ids)
        assert shard.num_tokens == len(rows[row].input_ids)
    tokens = sum(len(row.input_ids) for row in rows)
    assert manifest.stats["samples"] == len(rows)
    assert manifest.stats["tokens"] == tokens
    assert manifest.stats["bytes"] == sum(shard.size_bytes for shard in manifest.shards)
    assert manifest.stats["gates"]["agreement_by_slot"][-1] == 1.0
    assert manifest.stats["contract"]["layer_ids"] == (2, 4, 5)
    assert (events[-1].done, events[-1].total, events[-1].unit) == (tokens, tokens, "tokens")
    assert [event.done for event in events] == sorted(event.done for event in events)


def test_sealed_stage_is_reused(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    first = extract_hidden_states(recipe, run, answering_target.directory)
    events: list[ProgressEvent] = []
    again = extract_hidden_states(recipe, run, answering_target.directory, events.append)
    assert again.digest == first.digest
    assert not events
    assert run.sealed(Stage.HIDDEN_STATES).digest == first.digest


def test_interrupted_run_keeps_whole_files_and_redoes_the_rest(
    recipe: Recipe, run: RunDirectory, answering_target: Any
) -> None:
    first = extract_hidden_states(recipe, run, answering_target.directory)
    folder = run.stage_path(Stage.HIDDEN_STATES)
    (folder / "manifest.json").unlink()
    (folder / "hs_1.safetensors").unlink()
    cut = folder / "hs_2.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    shutil.copy(folder / "hs_4.safetensors", folder / "hs_5.safetensors")
    (folder / ".hs_6.safetensors.tmp").write_bytes(b"half")
    kept = (folder / "hs_0.safetensors").stat().st_mtime_ns
    again = extract_hidden_states(recipe, run, answering_target.directory)
    assert again.digest == first.digest
    assert again.stats["resumed_samples"] == len(first.shards) - 3
    assert (folder / "hs_0.safetensors").stat().st_mtime_ns == kept
    assert not list(folder.glob(".*.tmp"))


class _KilledError(Exception):
    """Stands for a process that ends in the middle."""


def test_stop_in_the_middle_resumes_to_the_same_digest(
    recipe: Recipe, run: RunDirectory, answering_target: Any, tmp_path: Path
) -> None:
    def stop_after_some(event: ProgressEvent) -> None:
        if event.done > event.total / 2:
            raise _KilledError

    twin = RunDirectory(tmp_path / "twin")
    shutil.copytree(run.path, twin.path)
    with pytest.raises(_KilledError):
        extract_hidden_states(recipe, run, answering_target.directory, stop_after_some)
    assert not (run.stage_path(Stage.HIDDEN_STATES) / "manifest.json").exists()
    resumed = extract_hidden_states(recipe, run, answering_target.directory)
    assert 0 < resumed.stats["resumed_samples"] < resumed.stats["samples"]
    assert resumed.digest == extract_hidden_states(recipe, twin, answering_target.directory).digest


def test_other_layers_are_another_stage(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    extract_hidden_states(recipe, run, answering_target.directory)
    with pytest.raises(StageDriftError, match="layer_ids"):
        extract_hidden_states(with_settings(recipe, layer_ids=(2, 3, 5)), run, answering_target.directory)


def test_batch_size_is_no_identity(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    first = extract_hidden_states(recipe, run, answering_target.directory)
    again = extract_hidden_states(with_settings(recipe, batch_tokens=512), run, answering_target.directory)
    assert again.created_at == first.created_at


def test_wrong_weights_stop_before_the_whole_corpus_is_done(
    recipe: Recipe, run: RunDirectory, other_target: Path
) -> None:
    with pytest.raises(GateError, match="target gate"):
        extract_hidden_states(recipe, run, other_target)
    folder = run.stage_path(Stage.HIDDEN_STATES)
    assert not (folder / "manifest.json").exists()
    assert len(list(folder.glob("hs_*.safetensors"))) == recipe.hidden_states.gate_samples


def test_too_small_disk_writes_nothing(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"GB .* GiB"):
        extract_hidden_states(with_settings(recipe, disk_reserve_bytes=10**18), run, answering_target.directory)
    assert not list(run.stage_path(Stage.HIDDEN_STATES).glob("hs_*"))


def test_layer_outside_the_target(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    with pytest.raises(RecipeError, match="has 8 layers"):
        extract_hidden_states(with_settings(recipe, layer_ids=(2, 8)), run, answering_target.directory)


def test_changed_corpus_is_not_read(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    path = run.stage_path(Stage.CORPUS) / "train" / "shard-00000.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptShardError, match="changed after it was sealed"):
        extract_hidden_states(recipe, run, answering_target.directory)


@pytest.mark.parametrize("damage", ["no weights", "no config", "short config"])
def test_unusable_target(recipe: Recipe, run: RunDirectory, answering_target: Any, tmp_path: Path, damage: str) -> None:
    target = tmp_path / "target"
    shutil.copytree(answering_target.directory, target)
    if damage == "no weights":
        (target / "model.safetensors").unlink()
    elif damage == "no config":
        (target / "config.json").unlink()
    else:
        (target / "config.json").write_text(json.dumps({"hidden_size": 32}))
    with pytest.raises(TargetError):
        extract_hidden_states(recipe, run, target)


@pytest.mark.parametrize("foreign_id", [-1, 267])
def test_ids_that_the_target_does_not_know(foreign_id: int) -> None:
    known = CorpusRow(input_ids=[0, 266], loss_mask=[False, True])
    check_ids([known], 267)
    foreign = CorpusRow(input_ids=[0, foreign_id], loss_mask=[False, True])
    with pytest.raises(GateError, match=r"corpus row 1 .* do not belong together"):
        check_ids([known, foreign], 267)


def test_gate_rows_are_spread_and_distinct() -> None:
    assert gate_rows(10, 5) == [0, 2, 4, 6, 8]
    assert gate_rows(3, 32) == [0, 1, 2]
    assert gate_rows(1, 1) == [0]


def test_importing_the_stage_imports_no_torch() -> None:
    code = "import sys, eagle3.hidden_states; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
