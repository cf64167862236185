"""The driver: what is in the files, equal bytes for equal input, resume, and refusals."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from eagle3.artifacts import Stage, StageManifest
from eagle3.corpus import assemble_corpus
from eagle3.errors import CorruptShardError, InputError, StageDriftError, StageMissingError
from eagle3.formats import CORPUS, corpus_row_to_sample, read_rows
from eagle3.recipe import Corpus
from eagle3.records import AuditReport, TokenSample

SETTINGS = Corpus(max_sample_tokens=512, validation_samples=4)


@pytest.fixture
def samples(tiny_run) -> tuple[list, list[TokenSample]]:
    prompts = [
        tiny_run.prompt(f"{dataset} question {number}", dataset=dataset)
        for dataset, size in (("one", 14), ("two", 6))
        for number in range(size)
    ]
    prompts.append(tiny_run.prompt("one question 3", dataset="two"))
    built = [
        tiny_run.sample(prompt, tiny_run.completion(prompt, content=f"It is {prompt.prompt_id}.")) for prompt in prompts
    ]
    return prompts, built


def seal(tiny, prompts, built, *, dropped=None, shard_samples: int = 1000) -> None:
    tiny.seal_prompts(prompts)
    tiny.seal_samples(built, shard_samples=shard_samples)
    report = AuditReport(
        num_samples=len(built),
        num_kept=len(built) - len(dropped or {}),
        verdict="passed",
        counts={},
        counts_by_provider={},
        exactness={},
        delta_by_provider={},
        findings=[],
        dropped=dropped or {},
    )
    stage = tiny.run.open_stage(Stage.AUDIT, {}, {})
    document = TypeAdapter(AuditReport).dump_json(report)
    stage.seal([stage.commit_shard("report.json", lambda path: _write(path, document), num_samples=0)], {})


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def assemble(tiny, **values) -> StageManifest:
    tiny = tiny.with_recipe(corpus=SETTINGS.model_copy(update=values))
    return assemble_corpus(tiny.recipe, tiny.run, tiny.target)


def rows(tiny, manifest: StageManifest, split: str) -> list[dict]:
    folder = tiny.run.stage_path(Stage.CORPUS)
    return [
        row
        for shard in manifest.shards
        if shard.path.startswith(f"{split}/")
        for row in read_rows(folder / shard.path, CORPUS)
    ]


def test_every_sample_arrives_once_and_unchanged(tiny_run, samples):
    prompts, built = samples
    seal(tiny_run, prompts, built)
    manifest = assemble(tiny_run)
    train, validation = rows(tiny_run, manifest, "train"), rows(tiny_run, manifest, "validation")
    assert len(validation) == 4
    by_id = {sample.sample_id: sample for sample in built}
    assert len({row["sample_id"] for row in [*train, *validation]}) == len(built)
    for row in [*train, *validation]:
        restored, original = corpus_row_to_sample(row), by_id[row["sample_id"]]
        assert tuple(restored.input_ids) == tuple(original.input_ids)
        assert restored.segments == original.segments
        assert (restored.dataset, restored.exactness) == (original.dataset, original.exactness)
    places = {sample.sample_id: place for place, sample in enumerate(built)}
    order = [places[row["sample_id"]] for row in train]
    assert order != sorted(order)


def test_stats_count_samples_and_tokens_per_split_and_dataset(tiny_run, samples):
    prompts, built = samples
    seal(tiny_run, prompts, built, dropped={built[0].sample_id: "A10"})
    stats = assemble(tiny_run).stats
    assert stats["left_out"] == {"audit:A10": 1}
    assert stats["train"]["samples"] + stats["validation"]["samples"] == len(built) - 1
    kept = built[1:]
    assert stats["train"]["tokens"] + stats["validation"]["tokens"] == sum(len(each.input_ids) for each in kept)
    completion = sum(len(each.input_ids) - each.num_prompt_tokens for each in kept)
    assert stats["train"]["completion_tokens"] + stats["validation"]["completion_tokens"] == completion
    one = stats["by_dataset"]["one"]
    assert one["train"]["samples"] + one["validation"]["samples"] == 13
    assert one["left_out"] == {"audit:A10": 1}
    assert stats["by_dataset"]["two"]["left_out"] == {}


def test_equal_input_gives_equal_bytes_however_it_was_cut_into_shards(make_run, samples):
    prompts, built = samples
    digests = []
    for name, shard_samples in (("a", 1000), ("b", 3), ("c", 1000)):
        tiny = make_run(name=name)
        seal(tiny, prompts, built, shard_samples=shard_samples)
        manifest = assemble(tiny)
        digests.append((manifest.stats["corpus_digest"], [shard.sha256 for shard in manifest.shards]))
    assert digests[0] == digests[1] == digests[2]


def test_another_seed_gives_another_order(make_run, samples):
    prompts, built = samples
    first, second = make_run(name="a"), make_run(name="b").with_recipe(seed=1)
    for tiny in (first, second):
        seal(tiny, prompts, built)
    assert assemble(first).stats["corpus_digest"] != assemble(second).stats["corpus_digest"]


def test_the_same_messages_in_two_datasets_stay_on_one_side(make_run, samples):
    prompts, built = samples
    twins = {prompt.sample_id for prompt in prompts if prompt.prompt_id == "one question 3"}
    assert len(twins) == 2
    for seed in range(12):
        tiny = make_run(name=f"run-{seed}").with_recipe(seed=seed)
        seal(tiny, prompts, built)
        train = {row["sample_id"] for row in rows(tiny, assemble(tiny, validation_samples=10), "train")}
        assert len(twins & train) in (0, 2)


def test_files_say_what_they_are(tiny_run, samples):
    seal(tiny_run, *samples)
    manifest = assemble(tiny_run, shard_samples=5)
    assert [shard.num_samples for shard in manifest.shards] == [5, 5, 5, 2, 4]
    for shard in manifest.shards:
        metadata = pq.read_schema(tiny_run.run.stage_path(Stage.CORPUS) / shard.path).metadata
        assert metadata[b"eagle3.schema"] == b"eagle3.corpus"
        assert metadata[b"eagle3.tokenizer_digest"].decode() == tiny_run.renderer.tokenizer.digest
        assert str(tiny_run.run.path).encode() not in b"".join(metadata.values())


def test_reuse_drift_and_resume(tiny_run, samples):
    seal(tiny_run, *samples)
    first = assemble(tiny_run)
    again = assemble(tiny_run)
    assert (again.digest, again.created_at) == (first.digest, first.created_at)
    with pytest.raises(StageDriftError, match=r"corpus\.validation_samples"):
        assemble(tiny_run, validation_samples=5)
    folder = tiny_run.run.stage_path(Stage.CORPUS)
    before = (folder / "train" / "shard-00000.parquet").stat().st_mtime_ns
    (folder / "manifest.json").unlink()
    (folder / "validation" / "shard-00000.parquet").unlink()
    assert assemble(tiny_run).digest == first.digest
    assert (folder / "train" / "shard-00000.parquet").stat().st_mtime_ns == before


def test_nothing_left_and_nothing_to_hold_out_stop_the_run(make_run, samples):
    prompts, built = samples
    empty = make_run(name="empty")
    seal(empty, prompts, built, dropped={each.sample_id: "A05" for each in built})
    with pytest.raises(InputError, match=r"would be empty: all 21 samples are left out.*audit:A05"):
        assemble(empty)
    single = make_run(name="single")
    seal(single, prompts[:1], built[:1])
    with pytest.raises(InputError, match="nothing can be held out"):
        assemble(single)


def test_stages_that_do_not_belong_together_are_refused(make_run, samples):
    prompts, built = samples
    missing = make_run(name="missing")
    with pytest.raises(StageMissingError):
        assemble(missing)
    seal(missing, prompts[1:], built)
    with pytest.raises(CorruptShardError, match="has no prompt in '1-prompts'"):
        assemble(missing)
    double = make_run(name="double")
    seal(double, prompts, [*built, built[0]])
    with pytest.raises(CorruptShardError, match="1 samples occur twice"):
        assemble(double)
    changed = make_run(name="changed")
    seal(changed, prompts, built)
    report = changed.run.stage_path(Stage.AUDIT) / "report.json"
    report.write_text(json.dumps({**json.loads(report.read_text()), "dropped": {"x": "A05"}}))
    with pytest.raises(CorruptShardError, match="changed after it was sealed"):
        assemble(changed)
