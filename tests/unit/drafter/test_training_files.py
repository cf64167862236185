import json

import pytest

from eagle3.artifacts import ShardRef
from eagle3.drafter.dataset import (
    CorpusRow,
    token_frequencies,
    train_data_ratio,
    vocabulary_coverage,
    write_trainer_data,
)
from eagle3.drafter.trainer_process import (
    TrainerJob,
    complete_epochs,
    read_metrics,
    run_trainer,
    sweep_checkpoints,
    trim_metrics,
)
from eagle3.drafter.training import check_same_rows, training_stats
from eagle3.errors import GateError, TrainingError


def make_epoch(checkpoints, name, state=None, *, weights=True):
    folder = checkpoints / str(name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if weights:
        (folder / "model.safetensors").write_text("")
    if state is not None:
        (folder / "training_state.json").write_text(state)
    return folder


def done(epoch: int) -> str:
    return json.dumps({"epoch": epoch, "local_step": 0, "global_step": 10})


@pytest.mark.parametrize(
    "state", [None, "", "{", '{"epoch": 2}', '{"epoch": 2, "local_step": 7}', '{"epoch": 1, "local_step": 0}']
)
def test_an_epoch_counts_only_when_its_state_says_so(tmp_path, state):
    make_epoch(tmp_path, 0, done(0))
    make_epoch(tmp_path, 1, done(1))
    torn = make_epoch(tmp_path, 2, state)
    assert complete_epochs(tmp_path) == 2
    sweep_checkpoints(tmp_path)
    assert not torn.exists()


def test_an_epoch_without_weights_does_not_count(tmp_path):
    make_epoch(tmp_path, 0, done(0), weights=False)
    assert complete_epochs(tmp_path) == 0
    assert complete_epochs(tmp_path / "absent") == 0


def test_the_checkpoint_of_a_stop_is_never_taken_for_an_epoch(tmp_path):
    make_epoch(tmp_path, 0, done(0))
    make_epoch(tmp_path, "interrupted", done(0))
    sweep_checkpoints(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0"]


def test_records_of_epochs_to_be_repeated_are_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"epoch": 0, "global_step": 0, "train": {}}, {"epoch": 1, "global_step": 1, "train": {}}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"epoch": 1, "glo')
    trim_metrics(path, 1)
    assert read_metrics(path) == lines[:1]


def test_a_trainer_that_fails_is_reported_with_the_end_of_its_log(tmp_path):
    job = TrainerJob(settings={"epochs": 2, "save_path": str(tmp_path)}, folder=tmp_path, num_threads=1)
    with pytest.raises(TrainingError, match=r"after 0 of 2 epochs, expected a complete checkpoint 1(.|\n)*Error"):
        run_trainer(job, lambda event: None)


def test_a_finished_training_is_not_started_again(tmp_path):
    job = TrainerJob(settings={"epochs": 1}, folder=tmp_path, num_threads=1)
    make_epoch(job.checkpoints, 0, done(0))
    run_trainer(job, lambda event: None)
    assert not (tmp_path / "trainer.log").exists()


def make_row(index: int, split: str, ids: list[int], dataset: str = "a") -> CorpusRow:
    mask = [False, *([True] * (len(ids) - 1))]
    return CorpusRow(
        sample_id=f"s{index}", dataset=dataset, split=split, input_ids=ids, loss_mask=mask, num_prompt_tokens=1
    )


ROWS = [
    make_row(0, "train", [9, 1, 1, 2]),
    make_row(1, "validation", [9, 1, 3, 3]),
    make_row(2, "validation", [9, 1], "b"),
]


def test_the_draft_vocabulary_looks_at_train_answers_only():
    assert token_frequencies(ROWS) == {1: 2, 2: 1}


def test_coverage_is_of_held_out_answers():
    assert vocabulary_coverage(ROWS, frozenset({1, 2})) == {"a": 0.3333, "all": 0.5, "b": 1.0}


def test_samples_that_the_trainer_would_cut_are_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"2 samples exceed .* 's0|2 samples exceed training.total_seq_len 3"):
        write_trainer_data(ROWS, tmp_path / "data", 3)
    assert not (tmp_path / "data").exists()


def test_a_corpus_without_loss_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="nothing to learn"):
        write_trainer_data(ROWS[1:], tmp_path / "data", 8)


@pytest.mark.parametrize(("num_train", "num_validation"), [(0, 3), (3, 0)])
def test_empty_splits_are_refused(num_train, num_validation):
    with pytest.raises(TrainingError, match="at least one of each"):
        train_data_ratio(num_train, num_validation)


def shard(row: int, num_tokens: int) -> ShardRef:
    return ShardRef(path=f"hs_{row}.safetensors", sha256="", size_bytes=0, num_samples=1, num_tokens=num_tokens)


def test_every_row_needs_its_own_hidden_states():
    check_same_rows(ROWS, [shard(0, 4), shard(1, 4), shard(2, 2)])
    with pytest.raises(GateError, match=r"1 of 3 corpus rows lack hidden states: \['hs_2"):
        check_same_rows(ROWS, [shard(0, 4), shard(1, 4)])
    with pytest.raises(GateError, match="holds 4 tokens, its sample 's2' has 2"):
        check_same_rows(ROWS, [shard(0, 4), shard(1, 4), shard(2, 4)])


def test_figures_of_a_training():
    train = [
        {
            "epoch": step // 500,
            "global_step": step,
            "train": {"loss": 10.0 - step / 100, "full_acc_0": 0.5, "full_acc_1": 0.25},
        }
        for step in range(1000)
    ]
    val = [{"epoch": 0, "val": {"loss_epoch": 7.0, "full_acc_0_epoch": 0.4, "cond_acc_0_epoch": 0.4}}]
    stats = training_stats([*train[:500], *val, *train[500:]])
    assert stats["steps"] == 1000
    assert stats["final_loss"] == pytest.approx(0.255)
    assert stats["final_accuracy"] == [0.5, 0.25]
    assert len(stats["loss_curve"]) <= 400
    assert stats["loss_curve"][0] == [0, 10.0]
    assert stats["validation"] == [{"epoch": 0, "loss": 7.0, "accuracy": [0.4], "conditional_accuracy": [0.4]}]
    assert training_stats([])["steps"] == 0
