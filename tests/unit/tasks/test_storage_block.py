from pathlib import Path

import pytest

from eagle3.errors import ConfigurationError
from tasks.storage_block import StorageRootBlock, resolve_run_root


def test_a_path_is_taken_as_it_is() -> None:
    assert resolve_run_root("runs") == "runs"


def test_a_folder_by_path_or_by_the_variable_of_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_TEST_ROOT", str(tmp_path))
    assert StorageRootBlock(path=str(tmp_path)).read_root() == tmp_path
    assert StorageRootBlock(environment_variable="EAGLE3_TEST_ROOT").read_root() == tmp_path


@pytest.mark.parametrize(
    "wrong",
    [
        StorageRootBlock(),
        StorageRootBlock(path="/", environment_variable="HOME"),
        StorageRootBlock(path="relative"),
        StorageRootBlock(path="/not/mounted/here"),
        StorageRootBlock(environment_variable="EAGLE3_TEST_UNSET"),
    ],
)
def test_a_folder_that_is_not_here_is_named(wrong: StorageRootBlock) -> None:
    with pytest.raises(ConfigurationError, match="storage root block"):
        wrong.read_root()
