from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import ConfigurationError, CorruptShardError, GateError
from eagle3.hidden_states.contract import CaptureContract
from eagle3.hidden_states.gates import GateSample
from eagle3.hidden_states.store import (
    HiddenStateStore,
    describe_bytes,
    estimate_bytes,
    read_states,
    require_disk_space,
)


@pytest.fixture
def contract(answering_target: Any) -> CaptureContract:
    return answering_target.contract


@pytest.fixture
def sample(samples: list[GateSample]) -> GateSample:
    return samples[0]


@pytest.fixture
def store(tmp_path: Path, contract: CaptureContract, sample: GateSample) -> HiddenStateStore:
    """A store with the sample as row 3."""
    store = HiddenStateStore(tmp_path / "states", contract)
    store.commit([3], [sample.input_ids], [sample.hidden_TLH])
    return store


def test_round_trip(store: HiddenStateStore, contract: CaptureContract, sample: GateSample) -> None:
    stored = read_states(store.path(3))
    assert stored.contract == contract
    assert stored.token_ids == list(sample.input_ids)
    assert bool((stored.hidden_TLH == sample.hidden_TLH).all())
    assert [path.name for path in store.directory.iterdir()] == ["hs_3.safetensors"]


def test_equal_states_give_equal_bytes(store: HiddenStateStore, sample: GateSample, tmp_path: Path) -> None:
    (again,) = HiddenStateStore(tmp_path / "again", store.contract).commit(
        [3], [sample.input_ids], [sample.hidden_TLH.clone()]
    )
    assert again == store.existing(3, sample.input_ids)


def test_the_trainer_reads_it(store: HiddenStateStore, sample: GateSample) -> None:
    from safetensors.torch import load_file

    tensors = load_file(store.path(3))
    assert set(tensors) == {"hidden_states", "token_ids"}
    assert tuple(tensors["hidden_states"].shape) == (len(sample.input_ids), 4, 32)
    assert str(tensors["token_ids"].dtype) == "torch.int64"


def _cut_short(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_cut_short, _empty, Path.unlink])
def test_damaged_file_does_not_count(
    store: HiddenStateStore, sample: GateSample, damage: Callable[[Path], None]
) -> None:
    assert store.existing(3, sample.input_ids) is not None
    damage(store.path(3))
    assert store.existing(3, sample.input_ids) is None


def test_file_of_other_ids_does_not_count(store: HiddenStateStore, sample: GateSample) -> None:
    assert store.existing(3, [*sample.input_ids[:-1], 0]) is None
    assert store.existing(3, sample.input_ids[:-1]) is None
    assert store.existing(2, sample.input_ids) is None


@pytest.mark.parametrize(
    "change", [{"layer_ids": (1, 3, 4)}, {"weights_sha256": "c" * 64}, {"transformers_version": "0"}]
)
def test_file_of_another_contract_does_not_count(
    store: HiddenStateStore, sample: GateSample, change: dict[str, Any]
) -> None:
    other = HiddenStateStore(store.directory, replace(store.contract, **change))
    assert other.existing(3, sample.input_ids) is None


def test_file_with_zeroed_states_does_not_count(store: HiddenStateStore, sample: GateSample) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(str(store.path(3)), framework="pt") as file:
        header = file.metadata()
    tensors = load_file(store.path(3))
    tensors["hidden_states"] = tensors["hidden_states"].clone()
    tensors["hidden_states"][-1] = 0
    save_file(tensors, str(store.path(3)), metadata=header)
    assert store.existing(3, sample.input_ids) is None


def test_reading_a_damaged_file_says_so(store: HiddenStateStore) -> None:
    _cut_short(store.path(3))
    with pytest.raises(CorruptShardError, match=r"'hs_3.safetensors' cannot be read"):
        store.read(3)


def test_file_without_contract_cannot_be_read(tmp_path: Path, sample: GateSample) -> None:
    from safetensors.torch import save_file

    save_file({"hidden_states": sample.hidden_TLH.contiguous()}, str(tmp_path / "hs_0.safetensors"))
    with pytest.raises(CorruptShardError, match="cannot be read"):
        read_states(tmp_path / "hs_0.safetensors")


def test_wrong_shape_or_dtype_is_never_written(store: HiddenStateStore, sample: GateSample) -> None:
    for states in (sample.hidden_TLH[:, :3], sample.hidden_TLH[1:], sample.hidden_TLH.bfloat16()):
        with pytest.raises(GateError, match="row 4 have shape"):
            store.commit([4], [sample.input_ids], [states])
    assert not store.path(4).exists()


def test_one_bad_row_keeps_its_whole_group_back(store: HiddenStateStore, sample: GateSample) -> None:
    bad = sample.hidden_TLH.clone()
    bad[0, 0, 0] = float("nan")
    with pytest.raises(GateError, match="row 5"):
        store.commit([4, 5], [sample.input_ids] * 2, [sample.hidden_TLH, bad])
    assert not store.path(4).exists()
    assert not store.path(5).exists()


def test_estimate_covers_what_is_written(store: HiddenStateStore, sample: GateSample) -> None:
    estimate = estimate_bytes(store.contract, [len(sample.input_ids)])
    size = store.path(3).stat().st_size
    assert size <= estimate <= size + 2048


def test_disk_reserve_stops_in_both_units(tmp_path: Path) -> None:
    require_disk_space(tmp_path / "not" / "there", 1, 0)
    with pytest.raises(ConfigurationError, match=r"need 1000000000.00 GB \(931322574.62 GiB\)"):
        require_disk_space(tmp_path / "not" / "there", 10**18, 0)
    with pytest.raises(ConfigurationError, match="disk_reserve_bytes"):
        require_disk_space(tmp_path, 0, 10**18)


def test_sizes_read_in_both_units() -> None:
    assert describe_bytes(2**30) == "1.07 GB (1.00 GiB)"
