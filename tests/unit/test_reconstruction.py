"""The reconstruction stage: shards line up, one bad answer costs one row, and unchanged work is not done again."""

from dataclasses import replace

import pytest

from eagle3.artifacts import Stage, verify_shard
from eagle3.errors import CorruptShardError, StageDriftError, StageMissingError
from eagle3.formats import TOKEN_SAMPLES, read_json_lines, read_rows, token_sample_from_row
from eagle3.recipe import Reconstruction
from eagle3.reconstruction import fit_profiles, reconstruct_completions, reconstruct_shard, seal_token_samples
from eagle3.records import Exactness
from eagle3.tokens.profiles import read_profiles


def sealed_run(tiny_run, count=30, change=lambda number, completion: completion):
    prompts = [tiny_run.prompt(f"Question {number}?", dataset=("one", "two")[number % 2]) for number in range(count)]
    completions = [
        change(
            number,
            tiny_run.completion(
                prompt,
                reasoning=f"Hm {number}." if number % 3 else None,
                content=f"Answer {number}.",
                finish_reason="length" if number % 4 == 0 else "stop",
            ),
        )
        for number, prompt in enumerate(prompts)
    ]
    tiny_run.seal_prompts(prompts)
    tiny_run.seal_completions(completions)
    return prompts, completions


def run_stage(tiny_run, events=None):
    progress = events.append if events is not None else lambda event: None
    return reconstruct_completions(tiny_run.recipe, tiny_run.run, tiny_run.target, progress)


def samples_of(tiny_run, manifest):
    return [
        token_sample_from_row(row)
        for shard in manifest.shards
        if shard.path.endswith(".parquet")
        for row in read_rows(verify_shard(tiny_run.run.stage_path(manifest.stage), shard), TOKEN_SAMPLES)
    ]


def findings_of(tiny_run, manifest):
    return read_json_lines(tiny_run.run.stage_path(manifest.stage) / "findings.jsonl")


def test_one_row_per_completion_in_order(tiny_run):
    prompts, completions = sealed_run(tiny_run)
    events = []
    manifest = run_stage(tiny_run, events)
    samples = samples_of(tiny_run, manifest)
    assert [shard.path for shard in manifest.shards] == [
        "one/shard-00000.parquet",
        "two/shard-00000.parquet",
        "profiles.json",
        "findings.jsonl",
    ]
    by_dataset = sorted(completions, key=lambda completion: completion.dataset)
    assert [sample.sample_id for sample in samples] == [completion.sample_id for completion in by_dataset]
    for sample in samples:
        prompt = next(prompt for prompt in prompts if prompt.sample_id == sample.sample_id)
        assert list(sample.input_ids[: sample.num_prompt_tokens]) == tiny_run.prompt_ids(prompt)
        assert sample.delta == 0
    assert events[-1].done == events[-1].total == 30
    assert manifest.stats["samples"] == 30
    assert sum(manifest.stats["exactness"].values()) == 30
    assert manifest.stats["prompt_tokens"] == sum(sample.num_prompt_tokens for sample in samples)
    assert manifest.stats["completion_tokens"] == sum(len(s.input_ids) - s.num_prompt_tokens for s in samples)
    assert manifest.stats["profiles"]["Acme · tiny/model"]["exact"] == 30


def test_mismatches_are_kept_and_counted(tiny_run):
    def plant(number, completion):
        if number == 3:
            return replace(completion, usage=completion.usage._replace(completion_tokens=5000))
        return completion

    _, completions = sealed_run(tiny_run, change=plant)
    manifest = run_stage(tiny_run)
    samples = {sample.sample_id: sample for sample in samples_of(tiny_run, manifest)}
    assert len(samples) == 30
    assert samples[completions[3].sample_id].exactness is Exactness.MISMATCH
    assert samples[completions[3].sample_id].delta < -4000
    assert manifest.stats["exactness"]["mismatch"] == 1


def test_answer_without_a_place_is_a_finding_and_not_a_crash(make_run):
    plain = make_run(mode="plain")
    prompt = plain.prompt("Question?")
    good = plain.completion(prompt, reasoning=None)
    bad_prompt = plain.prompt("Another?")
    bad = replace(plain.completion(bad_prompt, reasoning=None), reasoning="Unexpected.")
    plain.seal_prompts([prompt, bad_prompt])
    plain.seal_completions([good, bad])
    manifest = run_stage(plain)
    first, second = samples_of(plain, manifest)
    assert first.delta == 0
    assert second.exactness is Exactness.MISMATCH
    assert list(second.input_ids) == plain.prompt_ids(bad_prompt)
    assert [(row["rule"], row["sample_id"]) for row in findings_of(plain, manifest)] == [("not-rebuilt", bad.sample_id)]
    assert manifest.stats["findings"] == {"not-rebuilt": 1}


def test_prompt_the_template_refuses_is_a_finding(tiny_run):
    prompt, other = tiny_run.prompt("refuse me"), tiny_run.prompt("Question?")
    answer = tiny_run.completion(other)
    tiny_run.seal_prompts([prompt, other])
    tiny_run.seal_completions([replace(answer, sample_id=prompt.sample_id), answer])
    manifest = run_stage(tiny_run)
    refused, good = samples_of(tiny_run, manifest)
    assert refused.input_ids == []
    assert good.delta == 0
    assert findings_of(tiny_run, manifest)[0]["detail"].startswith("the chat template cannot render")


def test_native_ids_follow_the_recipe(tiny_run):
    def with_ids(number, completion):
        prompt = tiny_run.prompt(f"Question {number}?", dataset=completion.dataset)
        sample = tiny_run.sample(prompt, completion)
        return replace(completion, completion_token_ids=sample.input_ids[sample.num_prompt_tokens :])

    sealed_run(tiny_run, 4, with_ids)
    assert run_stage(tiny_run).stats["exactness"] == {"exact_ids": 4}
    tiny_run.run.discard([Stage.TOKEN_SAMPLES])
    ignoring = tiny_run.with_recipe(reconstruction=Reconstruction(use_server_ids=False))
    assert "exact_ids" not in run_stage(ignoring).stats["exactness"]


def test_sealed_stage_is_reused_and_drift_is_refused(tiny_run):
    sealed_run(tiny_run, 4)
    manifest = run_stage(tiny_run)
    again = run_stage(tiny_run)
    assert (again.digest, again.created_at) == (manifest.digest, manifest.created_at)
    other = tiny_run.with_recipe(reconstruction=Reconstruction(min_profile_samples=3))
    with pytest.raises(StageDriftError, match="min_profile_samples"):
        run_stage(other)


def test_interrupted_stage_goes_on_to_the_same_digest(tiny_run, make_run):
    sealed_run(tiny_run)
    whole = run_stage(tiny_run)
    again = make_run(name="again")
    sealed_run(again)
    arguments = again.recipe, again.run, again.target
    fit_profiles(*arguments)
    sources = [shard for shard in again.run.sealed(Stage.COMPLETIONS).shards if shard.path.endswith(".parquet")]
    first = reconstruct_shard(*arguments, sources[0])
    assert again.run.stage_path(Stage.TOKEN_SAMPLES).joinpath(first.path).is_file()
    assert reconstruct_shard(*arguments, sources[0]) == first
    assert run_stage(again).digest == whole.digest


def test_shards_may_be_made_one_by_one(tiny_run, make_run):
    sealed_run(tiny_run)
    whole = run_stage(tiny_run)
    parts = make_run(name="parts")
    sealed_run(parts)
    arguments = parts.recipe, parts.run, parts.target
    fit_profiles(*arguments)
    sources = parts.run.sealed(Stage.COMPLETIONS).shards
    shards = [reconstruct_shard(*arguments, shard) for shard in sources]
    assert seal_token_samples(*arguments, shards).digest == whole.digest


def test_profiles_are_kept_per_provider(tiny_run):
    sealed_run(tiny_run, change=lambda number, c: replace(c, provider="Beta") if number % 2 else c)
    run_stage(tiny_run)
    profiles = read_profiles(tiny_run.run.stage_path(Stage.TOKEN_SAMPLES) / "profiles.json")
    assert [(profile.provider, profile.num_samples) for profile in profiles] == [("Acme", 15), ("Beta", 15)]


def test_completion_without_its_prompt(tiny_run):
    prompt, other = tiny_run.prompt("Question?"), tiny_run.prompt("Another?")
    tiny_run.seal_prompts([prompt])
    tiny_run.seal_completions([tiny_run.completion(other)])
    with pytest.raises(CorruptShardError, match="has no prompt"):
        run_stage(tiny_run)


def test_shard_without_its_prompts(tiny_run):
    prompt = tiny_run.prompt("Question?", dataset="two")
    tiny_run.seal_prompts([tiny_run.prompt("Question?")])
    tiny_run.seal_completions([tiny_run.completion(prompt)])
    with pytest.raises(CorruptShardError, match="has no prompts shard"):
        run_stage(tiny_run)


def test_needs_the_earlier_stages(tiny_run):
    with pytest.raises(StageMissingError, match="1-prompts"):
        run_stage(tiny_run)
