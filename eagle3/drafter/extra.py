"""The optional dependencies of this stage, imported where they are used."""

import importlib
import importlib.util
from typing import Any

from eagle3.errors import MissingExtraError


def require_train_extra(*names: str) -> None:
    """Check that the modules are installed.

    Raises:
        MissingExtraError: One is not; the message says how to get it.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"training and evaluating a draft needs {missing}, which are not installed. Install the train extra "
            "(pip install 'eagle3-pipeline[train]') and then requirements-no-deps.txt with --no-deps."
        )


def import_torch() -> Any:
    """Import torch.

    Raises:
        MissingExtraError: It is not installed.
    """
    require_train_extra("torch")
    return importlib.import_module("torch")
