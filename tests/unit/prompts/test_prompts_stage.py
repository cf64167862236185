"""The driver: shards in file order, counted drops, replicas, reuse, drift."""

import json
from pathlib import Path

import pytest

from eagle3.artifacts import Stage, StageManifest
from eagle3.errors import InputError, StageDriftError
from eagle3.formats import prompt_from_json, read_json_lines
from eagle3.progress import ProgressEvent
from eagle3.prompts import prepare_prompts
from eagle3.records import PromptRecord, sample_id_of


def write(path: Path, *texts: str) -> None:
    lines = [
        json.dumps({"id": f"p{index}", "messages": [{"role": "user", "content": text}]})
        for index, text in enumerate(texts)
    ]
    path.write_text("\n".join(lines))


def records(tiny, manifest: StageManifest, dataset: str = "one") -> list[PromptRecord]:
    folder = tiny.run.stage_path(Stage.PROMPTS)
    paths = [folder / shard.path for shard in manifest.shards if shard.path.startswith(f"{dataset}/")]
    return [prompt_from_json(row) for path in paths for row in read_json_lines(path)]


def prepare(tiny, **values) -> StageManifest:
    return prepare_prompts(tiny.recipe, tiny.run, tiny.target, **values)


def test_shards_follow_the_file_and_drops_are_counted_and_listed(tmp_path: Path, tiny_run):
    write(tmp_path / "one.jsonl", "first", "second", "first", "say <end>", "refuse me", "third")
    manifest = prepare(tiny_run)
    assert [record.messages[0]["content"] for record in records(tiny_run, manifest)] == ["first", "second", "third"]
    assert [record.prompt_id for record in records(tiny_run, manifest)] == ["p0", "p1", "p5"]
    stats = manifest.stats["datasets"]["one"]
    assert (stats["prompts"], stats["samples"], stats["dropped"]) == (3, 3, 3)
    assert stats["dropped_by_reason"] == {"duplicate": 1, "special_literal": 1, "template": 1}
    dropped = read_json_lines(tiny_run.run.stage_path(Stage.PROMPTS) / "dropped.jsonl")
    assert [(row["line"], row["reason"]) for row in dropped] == [
        (3, "duplicate"),
        (4, "special_literal"),
        (5, "template"),
    ]
    assert "line 1" in dropped[0]["detail"]
    listed = next(shard for shard in manifest.shards if shard.path == "dropped.jsonl")
    assert listed.num_samples == 3


def test_prompt_tokens_are_those_of_the_rendered_prompts(tmp_path: Path, tiny_run):
    write(tmp_path / "one.jsonl", "first", "a longer one")
    manifest = prepare(tiny_run)
    expected = sum(len(tiny_run.prompt_ids(record)) for record in records(tiny_run, manifest))
    assert manifest.stats["datasets"]["one"]["prompt_tokens"] == expected
    assert manifest.shards[0].stats == {"dataset": "one", "prompt_tokens": expected}


def test_replicas_stand_side_by_side_and_shards_have_the_wanted_size(tmp_path: Path, make_run):
    write(tmp_path / "one.jsonl", *[f"text {number}" for number in range(5)])
    tiny = make_run(datasets=[{"name": "one", "path": "one.jsonl", "replicas": 2, "max_samples": 4}])
    tiny = tiny.with_recipe(prompts=tiny.recipe.prompts.model_copy(update={"shard_samples": 3}))
    manifest = prepare(tiny)
    assert [shard.num_samples for shard in manifest.shards[:-1]] == [3, 3, 2]
    assert [shard.path for shard in manifest.shards[:-1]] == [f"one/shard-0000{number}.jsonl" for number in range(3)]
    found = records(tiny, manifest)
    assert [(record.prompt_id, record.replica) for record in found[:3]] == [("p0", 0), ("p0", 1), ("p1", 0)]
    assert len({record.sample_id for record in found}) == 8
    assert found[1].sample_id == sample_id_of("one", found[1].messages, [], 1)
    assert manifest.stats["datasets"]["one"]["prompts"] == 4


def test_max_samples_counts_usable_prompts(tmp_path: Path, make_run):
    write(tmp_path / "one.jsonl", "first", "first", "say <end>", "second", "third")
    tiny = make_run(datasets=[{"name": "one", "path": "one.jsonl", "max_samples": 2}])
    assert [record.prompt_id for record in records(tiny, prepare(tiny))] == ["p0", "p3"]


def test_the_same_prompt_in_two_datasets_is_two_samples(tmp_path: Path, make_run):
    write(tmp_path / "a.jsonl", "same")
    write(tmp_path / "b.jsonl", "same")
    tiny = make_run(datasets=[{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl"}])
    manifest = prepare(tiny)
    assert records(tiny, manifest, "a")[0].sample_id != records(tiny, manifest, "b")[0].sample_id


def test_special_literals_can_be_kept(tmp_path: Path, tiny_run):
    write(tmp_path / "one.jsonl", "say <end>")
    keep = tiny_run.with_recipe(prompts=tiny_run.recipe.prompts.model_copy(update={"special_literals": "keep"}))
    assert len(records(keep, prepare(keep))) == 1


def test_nothing_left_missing_and_broken_files_stop_with_nothing_sealed(tmp_path: Path, tiny_run):
    with pytest.raises(InputError, match=r"'one\.jsonl' of dataset 'one' is missing"):
        prepare(tiny_run)
    write(tmp_path / "one.jsonl", "say <end>", "refuse me")
    with pytest.raises(InputError, match="leaves nothing to ask: all 2 prompts were dropped"):
        prepare(tiny_run)
    (tmp_path / "one.jsonl").write_text("{")
    with pytest.raises(InputError, match=r"'one\.jsonl' line 1"):
        prepare(tiny_run)
    assert not (tiny_run.run.stage_path(Stage.PROMPTS) / "manifest.json").exists()


def test_a_sealed_stage_is_reused_and_a_changed_file_is_drift(tmp_path: Path, tiny_run):
    write(tmp_path / "one.jsonl", "first")
    first = prepare(tiny_run)
    again = prepare(tiny_run)
    assert (again.digest, again.created_at) == (first.digest, first.created_at)
    write(tmp_path / "one.jsonl", "changed")
    with pytest.raises(StageDriftError, match=r"input 'dataset:one' now has digest"):
        prepare(tiny_run)


def test_equal_input_gives_equal_bytes(tmp_path: Path, make_run):
    write(tmp_path / "one.jsonl", *[f"text {number}" for number in range(20)])
    assert prepare(make_run(name="a")).digest == prepare(make_run(name="b")).digest


def test_progress_ends_with_all_prompts(tmp_path: Path, tiny_run):
    write(tmp_path / "one.jsonl", *[f"text {number}" for number in range(101)])
    events: list[ProgressEvent] = []
    prepare(tiny_run, progress=events.append)
    assert [(event.done, event.label) for event in events] == [(100, "one"), (101, "one")]
