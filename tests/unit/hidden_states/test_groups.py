"""Groups that several machines extract: the same bytes for any division, and never two at one group."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.artifacts import RunDirectory, Stage
from eagle3.errors import ArtifactError, ConfigurationError, GateError, RunLockedError
from eagle3.file_system import leading
from eagle3.hidden_states import Division, claim_of_groups, extract_group, extract_hidden_states
from eagle3.hidden_states.plan import plan_work
from eagle3.recipe import Recipe


def divided(recipe: Recipe, count: int) -> Recipe:
    return recipe.model_copy(update={"hidden_states": recipe.hidden_states.model_copy(update={"num_groups": count})})


def division(recipe: Recipe, run: RunDirectory) -> Division:
    return Division(run.stage_path(Stage.HIDDEN_STATES), recipe.hidden_states.num_groups)


def extract_one(recipe: Recipe, run: RunDirectory, target: Path, number: int) -> Any:
    claim = claim_of_groups(recipe, run, target)
    assert claim is not None
    groups = division(recipe, run)
    with leading(groups.folder, claim) as note, groups.holding([number]):
        return extract_group(recipe, run, target, number, note.id)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    batch_tokens=st.integers(1, 200),
    gate_samples=st.integers(1, 10),
    count=st.integers(1, 9),
)
def test_every_row_is_in_one_group_and_batches_do_not_depend_on_the_division(
    lengths: list[int], batch_tokens: int, gate_samples: int, count: int
) -> None:
    plan = plan_work(lengths, batch_tokens, gate_samples)
    groups = [plan.group(number, count) for number in range(count)]
    rows = Counter(row for group in groups for batch in group for row in batch)
    assert rows == Counter(range(len(lengths)))
    assert sorted(batch for group in groups for batch in group) == sorted(plan.group(0, 1))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_groups_on_several_machines_give_the_same_digest_as_one(
    recipe: Recipe, run: RunDirectory, answering_target: Any, tmp_path: Path, order: tuple[int, ...]
) -> None:
    alone = RunDirectory(tmp_path / "alone")
    shutil.copytree(run.path, alone.path)
    whole = extract_hidden_states(recipe, alone, answering_target.directory)
    many = divided(recipe, 3)
    records = [extract_one(many, run, answering_target.directory, number) for number in order]
    assert sum(len(record.shards) for record in records) == len(whole.shards)
    assert all(record.gates["agreement_by_slot"][-1] == 1.0 for record in records), "every machine proves itself"
    sealed = extract_hidden_states(many, run, answering_target.directory)
    assert sealed.digest == whole.digest
    assert sealed.stats["tokens"] == whole.stats["tokens"]
    assert not list(division(many, run).folder.glob("group-*.json"))


def test_groups_that_are_missing_are_made_by_whoever_seals(
    recipe: Recipe, run: RunDirectory, answering_target: Any, tmp_path: Path
) -> None:
    alone = RunDirectory(tmp_path / "alone")
    shutil.copytree(run.path, alone.path)
    many = divided(recipe, 4)
    extract_one(many, run, answering_target.directory, 2)
    kept = {path: path.stat().st_mtime_ns for path in run.stage_path(Stage.HIDDEN_STATES).glob("hs_*")}
    sealed = extract_hidden_states(many, run, answering_target.directory)
    assert kept
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items())
    assert sealed.digest == extract_hidden_states(recipe, alone, answering_target.directory).digest


def test_a_finished_group_is_not_made_again(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    many = divided(recipe, 2)
    first = extract_one(many, run, answering_target.directory, 1)
    assert extract_one(many, run, answering_target.directory, 1) == first
    assert first.resumed_samples == 0


def test_a_group_that_lost_a_file_is_made_again(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    many = divided(recipe, 2)
    first = extract_one(many, run, answering_target.directory, 1)
    (run.stage_path(Stage.HIDDEN_STATES) / first.shards[0].path).unlink()
    again = extract_one(many, run, answering_target.directory, 1)
    assert again.shards == first.shards
    assert again.resumed_samples == len(first.shards) - 1


def test_two_never_work_on_one_group(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    many = divided(recipe, 2)
    with division(many, run).holding([1]):
        assert division(many, run).is_held(1)
        assert not division(many, run).is_held(0)
        with pytest.raises(RunLockedError, match="group 2 of 2"), division(many, run).holding([1]):
            pass
        with pytest.raises(RunLockedError, match="group 2 of 2"):
            extract_hidden_states(many, run, answering_target.directory)


def test_groups_of_another_division_keep_others_out(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    with (
        division(divided(recipe, 3), run).holding([1]),
        pytest.raises(RunLockedError, match="another number of groups"),
    ):
        extract_hidden_states(recipe, run, answering_target.directory)


def test_files_that_others_are_writing_are_not_swept(recipe: Recipe, run: RunDirectory, answering_target: Any) -> None:
    many = divided(recipe, 2)
    folder = run.stage_path(Stage.HIDDEN_STATES)
    folder.mkdir()
    theirs = folder / ".hs_99999.safetensors.tmp"
    theirs.touch()
    extract_one(many, run, answering_target.directory, 0)
    assert theirs.exists()


def test_a_machine_with_other_weights_keeps_nothing(
    recipe: Recipe, run: RunDirectory, answering_target: Any, other_target: Path
) -> None:
    many = divided(recipe, 2)
    claim = claim_of_groups(many, run, answering_target.directory)
    assert claim is not None
    with leading(division(many, run).folder, claim) as note, pytest.raises(ConfigurationError, match="differ"):
        extract_group(many, run, other_target, 1, note.id)
    with pytest.raises(GateError, match="target gate"):
        extract_one(many, run, other_target, 1)
    assert not list(run.stage_path(Stage.HIDDEN_STATES).glob("hs_*"))


def test_a_damaged_record_is_named(recipe: Recipe, run: RunDirectory) -> None:
    groups = division(divided(recipe, 2), run)
    groups.folder.mkdir(parents=True)
    (groups.folder / "group-00001-of-00002.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"group-00001-of-00002\.json"):
        groups.record(1, "plan")
