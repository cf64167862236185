"""Our settings against the trainer's own configuration: nothing that shapes training is left to a default."""

from pathlib import Path

import pytest

from eagle3.drafter.dataset import CorpusRow, train_data_ratio, write_trainer_data
from eagle3.drafter.trainer_settings import (
    DEPRECATED_SETTINGS,
    OTHER_DRAFT_KINDS,
    SUPPORTED_SPECULATORS,
    trainer_settings,
)
from eagle3.recipe import Training

torch = pytest.importorskip("torch")
schema = pytest.importorskip("speculators.train.config.schema")


def settings(tmp_path: Path, **training: object):
    return trainer_settings(
        Training.model_validate(training),
        target=tmp_path / "target",
        data=tmp_path / "data",
        hidden_states=tmp_path / "states",
        checkpoints=tmp_path / "work" / "checkpoints",
        layer_ids=(2, 4, 5),
        mask_token_id=0,
        train_data_ratio=0.75,
        has_accelerator=False,
        compute_dtype="float32",
    )


def test_the_pinned_release_is_installed(project):
    from importlib.metadata import version

    assert version("speculators") == SUPPORTED_SPECULATORS
    assert f"speculators=={SUPPORTED_SPECULATORS}" in (project / "requirements-no-deps.txt").read_text()


def test_every_field_of_the_trainer_is_set_or_belongs_to_another_kind_of_draft(tmp_path):
    ours = set(settings(tmp_path))
    elsewhere = {name for group in OTHER_DRAFT_KINDS for name in schema._GROUPS[group].model_fields}
    from speculators.train.config.resolution import _BACKEND_DESTS

    # The file backend has one field of its own; the others belong to backends we do not use.
    backend = {"hidden_states_path"}
    assert backend <= set(_BACKEND_DESTS)
    assert ours == (set(schema.CONFIG_DESTS) - elsewhere - DEPRECATED_SETTINGS) | backend


def test_settings_survive_the_round_trip_through_the_trainer(tmp_path):
    wanted = settings(tmp_path, epochs=7, learning_rate=0.003, draft_vocab_size=4096, norm_before_fc=True)
    states = wanted.pop("hidden_states_path")
    config = schema.TrainConfig.from_sources(cli=wanted, argv=["x"], backend_cli={"hidden_states_path": states})
    found = config.flatten()
    assert {name: found[name] for name in wanted} == wanted
    assert all(config.provenance[name] == "flag" for name in wanted)
    (tmp_path / "run.yaml").write_text(config.dump_yaml())
    again = schema.TrainConfig.from_sources(cli={}, config_path=str(tmp_path / "run.yaml"), argv=["x"])
    assert again.flatten() == found


def test_an_engine_can_serve_what_these_settings_train(tmp_path):
    ours = settings(tmp_path)
    assert ours["norm_before_residual"] is False
    assert ours["full_attention_indices"] == [0]
    assert ours["num_layers"] == 1
    assert ours["on_missing"] == "raise"


@pytest.mark.parametrize(("num_train", "num_validation"), [(1, 1), (29, 71), (57, 43), (572, 48), (99_999, 1)])
def test_the_trainers_split_falls_between_our_splits(num_train, num_validation):
    assert int((num_train + num_validation) * train_data_ratio(num_train, num_validation)) == num_train


def test_the_trainers_own_loader_reads_exactly_our_validation_rows(tmp_path):
    from speculators.train.data import ArrowDataset

    rows = [
        CorpusRow(
            sample_id=str(index),
            dataset="a",
            split="train" if index < 7 else "validation",
            input_ids=[index + 1, 50, 51],
            loss_mask=[False, True, True],
            num_prompt_tokens=1,
        )
        for index in range(10)
    ]
    write_trainer_data(rows, tmp_path / "data", 8)
    for split, wanted in (("train", range(7)), ("val", range(7, 10))):
        part = ArrowDataset(8, tmp_path / "data", train_ratio=train_data_ratio(7, 3), split=split, on_missing="raise")
        assert [part._map_to_file_idx(index) for index in range(len(part))] == list(wanted)
        assert [int(row["input_ids"][0]) - 1 for row in part.data] == list(wanted)
    assert torch.load(tmp_path / "data" / "token_freq.pt", weights_only=True) == {50: 7, 51: 7}
