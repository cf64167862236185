"""The run directory under crashes, changes, other recipes and other processes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.artifacts import (
    MANIFEST_NAME,
    OpenStage,
    RunDirectory,
    Stage,
    StageStatus,
    commit_json,
    committed_file,
    fingerprint_of,
    read_manifest,
    verify_shard,
)
from eagle3.drift import differing_fields
from eagle3.errors import ArtifactError, CorruptShardError, RunLockedError, StageDriftError, StageMissingError

IDENTITY = {"corpus": {"cap": 5, "order": [1, 2]}, "seed": 0}
INPUTS = {"1-prompts": "aa"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(max_size=4), json_values, max_size=4)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def corpus(run: RunDirectory, identity=None, inputs=None) -> OpenStage:
    return run.open_stage(Stage.CORPUS, identity or IDENTITY, inputs or INPUTS)


def commit(stage: OpenStage, name: str = "train/shard-00000.parquet", data: bytes = b"rows"):
    def write(path: Path) -> None:
        path.write_bytes(data)

    return stage.commit_shard(name, write, num_samples=2, num_tokens=7, stats={"split": "train"})


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path):
    path = tmp_path / "folder" / "file"
    commit_json(path, {"old": 1})

    def write_half() -> None:
        with committed_file(path) as temporary:
            temporary.write_bytes(b"half of the ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert json.loads(path.read_bytes()) == {"old": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_process_killed_between_write_and_rename_leaves_only_what_opening_sweeps(run: RunDirectory):
    sealed = corpus(run)
    sealed.seal([commit(sealed)], {})
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from eagle3.artifacts import committed_file\n"
        "with committed_file(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    target = sealed.file("train/shard-00000.parquet")
    ended = subprocess.run([sys.executable, "-c", program, str(target)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"rows"
    assert len(list(target.parent.iterdir())) == 2
    reopened = corpus(run)
    assert [entry.name for entry in target.parent.iterdir()] == [target.name]
    assert reopened.manifest is not None
    assert run.shard_paths(reopened.manifest) == [target]


def test_shards_of_an_unfinished_stage_are_taken_up_again(run: RunDirectory):
    stage = corpus(run)
    shard = commit(stage)
    assert corpus(run).manifest is None
    assert corpus(run).existing_shard(shard.path) == shard
    assert corpus(run).existing_shard("train/shard-00001.parquet") is None


def test_a_shard_that_changed_or_is_of_other_settings_is_made_again(run: RunDirectory):
    shard = commit(corpus(run))
    assert corpus(run, identity={**IDENTITY, "seed": 1}).existing_shard(shard.path) is None
    assert corpus(run, inputs={"1-prompts": "bb"}).existing_shard(shard.path) is None
    corpus(run).file(shard.path).write_bytes(b"r0ws")
    assert corpus(run).existing_shard(shard.path) is None
    corpus(run).file(shard.path).unlink()
    assert corpus(run).existing_shard(shard.path) is None


def test_a_stage_exists_only_once_its_manifest_does(run: RunDirectory):
    stage = corpus(run)
    shard = commit(stage)
    with pytest.raises(StageMissingError, match=r"'5-corpus' must be complete first.*not started.*eagle3 corpus"):
        run.sealed(Stage.CORPUS)
    stage.seal([shard], {"samples": 2}, StageStatus.PAUSED)
    with pytest.raises(StageMissingError, match="paused"):
        run.sealed(Stage.CORPUS)
    assert corpus(run).manifest is None
    stage.seal([shard], {"samples": 2})
    manifest = run.sealed(Stage.CORPUS)
    assert (manifest.shards, manifest.stats, manifest.inputs) == ([shard], {"samples": 2}, INPUTS)
    assert read_manifest(run.stage_path(Stage.CORPUS)) == manifest


def test_drift_names_the_fields_and_the_ways_on(run: RunDirectory):
    stage = corpus(run)
    stage.seal([commit(stage)], {})
    other = {"corpus": {"cap": 6, "order": [1, 2]}, "seed": 0}
    with pytest.raises(StageDriftError) as caught:
        corpus(run, identity=other, inputs={"1-prompts": "bb"})
    message = str(caught.value)
    assert "corpus.cap: the recipe says 6, the run was made with 5" in message
    assert "input '1-prompts' now has digest bb, the run was made from aa" in message
    assert "seed" not in message
    assert "--redo corpus" in message


def test_a_field_at_its_default_reads_as_nothing_in_a_drift():
    assert differing_fields({"a": {"x": 1}}, {"a": {"x": 1, "y": None}}) == [
        "a.y: the recipe says nothing, the run was made with None"
    ]


def test_drift_of_paid_answers_does_not_offer_to_make_them_again_by_itself(run: RunDirectory):
    stage = run.open_stage(Stage.COMPLETIONS, IDENTITY, {})
    stage.seal([], {})
    with pytest.raises(StageDriftError) as caught:
        run.open_stage(Stage.COMPLETIONS, {}, {})
    assert "--redo" not in str(caught.value)


def test_changed_and_missing_shards_are_refused(run: RunDirectory):
    stage = corpus(run)
    shard = commit(stage)
    folder = run.stage_path(Stage.CORPUS)
    assert verify_shard(folder, shard) == stage.file(shard.path)
    stage.file(shard.path).write_bytes(b"r0ws")
    with pytest.raises(
        CorruptShardError, match=r"'5-corpus/train/shard-00000.parquet' has sha256 .* its manifest says"
    ):
        verify_shard(folder, shard)
    stage.file(shard.path).unlink()
    with pytest.raises(CorruptShardError, match=r"is missing although its manifest lists it.*eagle3 corpus"):
        verify_shard(folder, shard)


@pytest.mark.parametrize("content", ["{", "{}", '{"stage": "5-corpus", "shards": 3}'])
def test_an_unreadable_manifest_is_an_error_and_not_an_unfinished_stage(run: RunDirectory, content: str):
    folder = run.stage_path(Stage.CORPUS)
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).write_text(content)
    with pytest.raises(ArtifactError, match="Delete the folder '5-corpus'"):
        corpus(run)


def test_a_digest_depends_on_contents_and_not_on_time_or_figures(run: RunDirectory, tmp_path: Path):
    one, two = corpus(run), corpus(RunDirectory(tmp_path / "other"))
    first = one.seal([commit(one)], {"seconds": 1})
    assert two.seal([commit(two)], {"seconds": 2}).digest == first.digest
    assert two.seal([commit(two, data=b"other")], {"seconds": 2}).digest != first.digest


def test_no_absolute_path_in_a_manifest(run: RunDirectory):
    stage = corpus(run)
    stage.seal([commit(stage)], {})
    assert str(run.path) not in (run.stage_path(Stage.CORPUS) / MANIFEST_NAME).read_text()


def test_one_writer_at_a_time_and_the_lock_dies_with_its_process(run: RunDirectory):
    with run.locked(), pytest.raises(RunLockedError, match="in use by process"), RunDirectory(run.path).locked():
        pass
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from eagle3.artifacts import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).locked():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(run.path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    with run.locked():
        pass


def test_paid_answers_are_never_discarded(run: RunDirectory):
    stage = corpus(run)
    stage.seal([commit(stage)], {})
    for kept in (Stage.PROMPTS, Stage.COMPLETIONS):
        with pytest.raises(ArtifactError, match="paid for"):
            run.discard([Stage.CORPUS, kept])
    assert run.sealed(Stage.CORPUS)
    run.discard([Stage.CORPUS])
    assert not run.stage_path(Stage.CORPUS).exists()


def test_attempts_are_numbered_and_latest_follows(run: RunDirectory):
    assert run.begin_attempt({"a": 1}).name == "0001"
    assert run.begin_attempt({"a": 2}).name == "0002"
    other = RunDirectory(run.path.parent / "other")
    other.path.mkdir()
    run.point_latest()
    other.point_latest()
    assert (run.path.parent / "latest").readlink() == Path("other")


@given(json_objects)
def test_equal_objects_differ_in_no_field_and_have_one_fingerprint(value: dict):
    shuffled = dict(reversed(list(value.items())))
    assert differing_fields(value, shuffled) == []
    assert fingerprint_of(value, {}) == fingerprint_of(shuffled, {})


@given(json_objects, json_objects)
def test_fingerprints_tell_objects_apart(one: dict, other: dict):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (fingerprint_of(one, {}) == fingerprint_of(other, {})) == same
