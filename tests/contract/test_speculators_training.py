"""The drafter stages over a tiny random target: real speculators, real subprocess, real files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.artifacts import RunDirectory, Stage
from eagle3.drafter import evaluate_draft, export_draft, train_draft
from eagle3.drafter.draft_model import load_draft
from eagle3.drafter.evaluation import Continuation, check_report, measure
from eagle3.drafter.export import check_bundle
from eagle3.drafter.target_facts import read_target_facts
from eagle3.drafter.trainer_process import complete_epochs, read_metrics
from eagle3.errors import EvaluationError, ExportError, GateError
from eagle3.formats import hidden_states_name
from eagle3.progress import ProgressEvent
from tests.contract.tiny_drafter import (
    LAYER_IDS,
    NUM_TRAIN,
    NUM_VALIDATION,
    PROMPT_TOKENS,
    make_recipe,
    make_run,
    make_target,
)

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target):
    """A run whose draft was trained: (recipe, run, manifest, events)."""
    folder = tmp_path_factory.mktemp("run")
    recipe, run = make_recipe(folder), make_run(folder / "r", target)
    events: list[ProgressEvent] = []
    manifest = train_draft(recipe, run, target, events.append)
    return recipe, run, manifest, events


def test_training_learns_and_seals(trained, target):
    recipe, run, manifest, events = trained
    assert [shard.path for shard in manifest.shards] == ["checkpoint/config.json", "checkpoint/model.safetensors"]
    stats = manifest.stats
    assert stats["validation"][-1]["loss"] < stats["validation"][0]["loss"]
    assert [entry["epoch"] for entry in stats["validation"]] == list(range(6))
    assert stats["steps"] == len(stats["loss_curve"])
    assert (stats["train_samples"], stats["validation_samples"]) == (NUM_TRAIN, NUM_VALIDATION)
    assert 0.0 < stats["draft_vocab_coverage"]["all"] <= 1.0
    assert events[-1].done == events[-1].total == stats["steps"]
    assert train_draft(recipe, run, target).digest == manifest.digest
    text = (run.path / "7-draft" / "checkpoint" / "config.json").read_text()
    assert str(target) not in text
    assert json.loads(text)["speculators_config"]["verifier"]["name_or_path"] == "tiny-target"


def test_the_trainer_writes_nothing_about_the_repository_around_it(trained):
    """The virtual environment may lie in the user's project, and the trainer would take that for its own."""
    _, run, _, _ = trained
    work = run.stage_path(Stage.DRAFT) / "work"
    command = next(work.glob("*/checkpoints/train_command.txt")).read_text()
    assert "# Git SHA: unknown" in command
    assert not list(work.rglob("*.patch"))


@pytest.fixture(scope="module")
def evaluated(trained, target):
    recipe, run, _, _ = trained
    return evaluate_draft(recipe, run, target)


def test_a_trained_draft_accepts_more_than_an_untrained_one(evaluated):
    stats = evaluated.stats
    assert stats["acceptance_length_trained"] > stats["acceptance_length_untrained"] + 3 * stats["standard_error"]
    assert stats["acceptance_length_trained"] == pytest.approx(1 + sum(stats["acceptance_by_position"]), abs=1e-3)
    assert stats["rounds"] > 20
    assert [shard.path for shard in evaluated.shards] == ["continuations.jsonl", "report.json"]


class _InsteadOfTrainingError(Exception):
    """Raised instead of training."""


@pytest.mark.parametrize(("is_fast", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_the_trainer_computes_in_what_the_machine_can(tmp_path, target, monkeypatch, is_fast, expected):
    def refuse(job, _reporter):
        raise _InsteadOfTrainingError(job.settings["hidden_states_dtype"])

    monkeypatch.setattr("eagle3.precision.has_fast_bfloat16", lambda: is_fast)
    monkeypatch.setattr("eagle3.drafter.training.run_trainer", refuse)
    recipe, run = make_recipe(tmp_path, dtype="bfloat16"), make_run(tmp_path / "r", target)
    with pytest.raises(_InsteadOfTrainingError, match=expected):
        train_draft(recipe, run, target)


def load_trainer_model(checkpoint: Path, target: Path):
    """The trained draft in the trainer's own modules."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = str(target)
    return Eagle3DraftModel.from_pretrained(checkpoint, config=config).float().eval()


@pytest.fixture(scope="module")
def sample(trained):
    """Ids [T] and features [T, K] of a held-out sample."""
    from safetensors.torch import load_file

    _, run, _, _ = trained
    tensors = load_file(run.stage_path(Stage.HIDDEN_STATES) / hidden_states_name(NUM_TRAIN + 1))
    return tensors["token_ids"], tensors["hidden_states"][:, :-1].flatten(1)


def test_our_forward_pass_is_that_of_training(trained, target, sample):
    _, run, _, _ = trained
    checkpoint = run.stage_path(Stage.DRAFT) / "checkpoint"
    ids, features = sample
    theirs = load_trainer_model(checkpoint, target)
    ours = load_draft(checkpoint)
    with torch.inference_mode():
        drafted, _ = ours.trace(ids, features, 3, teacher_ids_T=ids)
        expected = theirs(
            hidden_states=features[None, :-1],
            input_ids=ids[None, 1:],
            document_ids=torch.zeros(1, len(ids) - 1, dtype=torch.long),
        )
    for step in range(3):
        valid = len(ids) - 1 - step
        assert torch.equal(drafted[:valid, step], ours.target_ids_D[expected[step][0, :valid]])


def test_chains_from_everywhere_are_those_of_step_by_step_drafting(trained, target, sample):
    """An engine drafts from one position, token by token, with a cache; so do the trainer's modules here."""
    from transformers import DynamicCache

    _, run, _, _ = trained
    checkpoint = run.stage_path(Stage.DRAFT) / "checkpoint"
    ids, features = sample
    ours, theirs = load_draft(checkpoint), load_trainer_model(checkpoint, target)
    with torch.inference_mode():
        chains = ours.draft_everywhere(ids, features, 3).tolist()
        for start in (PROMPT_TOKENS - 1, 11, 20):
            cache = DynamicCache()
            tokens, hidden = ids[1 : start + 2], theirs.fc(features[: start + 1])
            positions = torch.arange(1, start + 2)
            chain = []
            for _ in range(3):
                both = torch.cat([theirs.embed_tokens(tokens), hidden], dim=-1)[None]
                seen = cache.get_seq_length() + len(tokens)
                mask = torch.full((len(tokens), seen), float("-inf")).triu(seen - len(tokens) + 1)[None, None]
                out = theirs.layers[0](
                    both,
                    attention_mask=mask,
                    position_ids=positions[None],
                    past_key_values=cache,
                    position_embeddings=theirs.rotary_emb(both, positions[None]),
                )[0]
                logits = theirs.lm_head(theirs.norm(out[-1]))
                chain.append(int(ours.target_ids_D[logits.argmax()]))
                tokens, hidden = torch.tensor([chain[-1]]), out[-1:]
                positions = positions[-1:] + 1
            assert chain == chains[start]


def test_hidden_states_of_another_convention_are_refused(trained, target, tmp_path):
    recipe, run, _, _ = trained
    other = RunDirectory(tmp_path / "r")
    shutil.copytree(run.path, other.path, ignore=shutil.ignore_patterns("7-draft", "8-*", "9-*"))
    path = other.stage_path(Stage.HIDDEN_STATES) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["stats"]["contract"]["final_slot"] = "post_norm"
    path.write_text(json.dumps(manifest))
    with pytest.raises(GateError, match="final_slot is 'post_norm', expected 'pre_norm'"):
        train_draft(recipe, other, target)


def test_a_draft_that_accepts_nothing_fails_the_stage(evaluated):
    with pytest.raises(EvaluationError, match="acceptance length is"):
        check_report(evaluated.stats, min_acceptance_length=evaluated.stats["acceptance_length_trained"])


def test_continuations_too_short_for_a_round_fail(trained, sample):
    _, run, _, _ = trained
    draft = load_draft(run.stage_path(Stage.DRAFT) / "checkpoint")
    ids, features = sample
    short = Continuation(
        sample_id="s", dataset="a", input_ids=ids[: PROMPT_TOKENS + 3].tolist(), num_prompt_tokens=PROMPT_TOKENS
    )
    with pytest.raises(EvaluationError, match="none of 1 continuations is longer than 4 tokens"):
        measure(draft, [short], lambda _: features[: PROMPT_TOKENS + 3], num_draft_tokens=3, num_layers=3, seed=0)


@pytest.fixture(scope="module")
def exported(trained, evaluated, target):
    recipe, run, _, _ = trained
    return export_draft(recipe, run, target)


def test_bundles_hold_what_engines_look_for(trained, exported):
    _, run, _, _ = trained
    folder = run.stage_path(Stage.EXPORT)
    names = {shard.path for shard in exported.shards}
    assert {"sglang/serve_sglang.sh", "vllm/serve_vllm.sh", "sglang/README.md", "vllm/config.json"} <= names
    config = json.loads((folder / "sglang" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [layer - 1 for layer in LAYER_IDS]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["draft_vocab_size"] == 96
    assert exported.stats["checks"]["sglang"]["max_logit_difference"] == 0.0
    from safetensors import safe_open

    with safe_open(folder / "sglang" / "model.safetensors", "pt") as file:
        tensor_names = set(file.keys())
    assert "midlayer.self_attn.q_proj.weight" in tensor_names
    assert not any(name.startswith("layers.") for name in tensor_names)


@pytest.mark.parametrize("fault", ["missing", "surplus", "value", "shape", "layer_ids", "norm_output"])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_damaged_bundle_is_refused(trained, exported, target, tmp_path, engine, fault):
    from safetensors.torch import load_file, save_file

    _, run, _, _ = trained
    bundle = tmp_path / engine
    shutil.copytree(run.stage_path(Stage.EXPORT) / engine, bundle)
    tensors = load_file(bundle / "model.safetensors")
    config = json.loads((bundle / "config.json").read_text())
    if fault == "missing":
        del tensors["fc.weight"]
    elif fault == "surplus":
        tensors["model.norm.weight"] = tensors["norm.weight"].clone()
    elif fault == "value":
        tensors["norm.weight"][0] += 1
    elif fault == "shape":
        tensors["d2t"] = tensors["d2t"][:-1].clone()
    elif fault == "layer_ids":
        place = config["eagle_config"] if engine == "sglang" else config
        place["eagle_aux_hidden_state_layer_ids"][0] += 1
    else:
        config["norm_output"] = True
    save_file(tensors, bundle / "model.safetensors")
    (bundle / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError):
        check_bundle(run.stage_path(Stage.DRAFT) / "checkpoint", bundle, engine, read_target_facts(target))


RESUMED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from eagle3.artifacts import RunDirectory
from eagle3.drafter import train_draft
from tiny_drafter import make_recipe
train_draft(make_recipe(Path(sys.argv[2]), epochs=40), RunDirectory(Path(sys.argv[3])), Path(sys.argv[4]))
"""


def start_training(run: RunDirectory, folder: Path, target: Path) -> "subprocess.Popen[bytes]":
    arguments = [str(Path(__file__).parent), str(folder), str(run.path), str(target)]
    return subprocess.Popen([sys.executable, "-c", RESUMED, *arguments], stderr=subprocess.PIPE)


def wait_for_epochs(run: RunDirectory, process: "subprocess.Popen[bytes]", count: int) -> Path:
    while process.poll() is None:
        for checkpoints in run.stage_path(Stage.DRAFT).glob("work/*/checkpoints"):
            if complete_epochs(checkpoints) >= count:
                return checkpoints
        time.sleep(0.05)
    raise AssertionError(f"training ended too early: {process.communicate()[1].decode()[-2000:]}")


def test_killed_and_stopped_training_goes_on_after_its_last_complete_epoch(trained, target, tmp_path):
    _, finished, _, _ = trained
    run = RunDirectory(tmp_path / "r")
    shutil.copytree(finished.path, run.path, ignore=shutil.ignore_patterns("7-draft", "8-*", "9-*"))
    killed = start_training(run, tmp_path, target)
    checkpoints = wait_for_epochs(run, killed, 2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    after_kill = complete_epochs(checkpoints)

    stopped = start_training(run, tmp_path, target)
    wait_for_epochs(run, stopped, after_kill + 2)
    os.kill(stopped.pid, signal.SIGTERM)
    _, errors = stopped.communicate()
    assert stopped.returncode == 1
    assert b"StoppedError: training was stopped after" in errors
    after_stop = complete_epochs(checkpoints)
    assert after_kill + 2 <= after_stop < 40

    recipe = make_recipe(tmp_path, epochs=40)
    seen: list[ProgressEvent] = []
    manifest = train_draft(recipe, run, target, seen.append)
    assert not (checkpoints / "interrupted").exists()
    steps = [event["global_step"] for event in read_metrics(checkpoints.parent / "metrics.jsonl") if "train" in event]
    assert steps == list(range(manifest.stats["steps"]))
    steps_per_epoch = manifest.stats["steps"] // 40
    assert seen[0].done >= after_stop * steps_per_epoch
