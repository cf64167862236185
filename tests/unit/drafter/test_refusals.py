import pytest

from eagle3.artifacts import RunDirectory, Stage
from eagle3.drafter.dataset import read_corpus
from eagle3.drafter.draft_model import read_draft_shape
from eagle3.drafter.extra import require_train_extra
from eagle3.errors import ArtifactError, EvaluationError, MissingExtraError

LAYER = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def test_a_missing_module_is_named_with_the_way_to_get_it():
    require_train_extra("json")
    with pytest.raises(MissingExtraError, match=r"\['no_such_module'\].*requirements-no-deps\.txt"):
        require_train_extra("json", "no_such_module")


def test_both_forms_of_config_give_the_same_shape():
    nested = read_draft_shape({"transformer_layer_config": LAYER, "norm_output": True, "norm_before_fc": True})
    flat = read_draft_shape({**LAYER, "norm_output": True, "eagle_config": {"norm_before_fc": True}})
    assert nested == flat
    assert (flat.head_size, flat.num_key_heads, flat.norm_before_fc, flat.norm_output) == (16, 2, True, True)


@pytest.mark.parametrize(
    "change", [{"model_type": "qwen3"}, {"num_hidden_layers": 2}, {"norm_before_residual": True}, {"fc_norm": True}]
)
def test_drafts_with_parts_we_do_not_have_are_refused(change):
    with pytest.raises(EvaluationError, match=f"{next(iter(change))}.* is .*, expected"):
        read_draft_shape({**LAYER, **change})


def test_a_corpus_with_files_of_an_unknown_split_is_refused(tmp_path):
    run = RunDirectory(tmp_path)
    stage = run.open_stage(Stage.CORPUS, {}, {})
    shard = stage.commit_shard("test/shard-00000.parquet", lambda path: path.touch(), num_samples=0)
    with pytest.raises(ArtifactError, match=r"lists \['test/shard"):
        read_corpus(run, stage.seal([shard], {}))
