"""The Prefect block for the folder that holds runs: one name for it, wherever each machine mounts it."""

import os
from pathlib import Path
from typing import cast

from prefect.blocks.core import Block
from pydantic import Field

from eagle3.errors import ConfigurationError

PREFIX = "block:"
"""A run root that starts so names a block."""


class StorageRootBlock(Block):
    """Where runs lie; exactly one field is filled in."""

    _block_type_name = "eagle3 storage root"
    _block_type_slug = "eagle3-storage-root"
    _description = "Folder that holds the run directories, as the workers see it. Use it as run_root: block:NAME."

    path: str = Field(default="", description="The folder, when every worker sees it by the same path.")
    environment_variable: str = Field(
        default="", description="Name of a variable that holds the folder on each worker, when the paths differ."
    )

    def read_root(self) -> Path:
        """Return the folder on this machine.

        Raises:
            ConfigurationError: Not exactly one field is filled in, or the folder is not there.
        """
        if bool(self.path) == bool(self.environment_variable):
            raise ConfigurationError(
                "a storage root block needs exactly one of path and environment_variable. Edit it in the Prefect UI."
            )
        text = self.path or os.environ.get(self.environment_variable, "")
        root = Path(text)
        if not text or not root.is_absolute() or not root.is_dir():
            place = "path" if self.path else f"variable {self.environment_variable!r}"
            raise ConfigurationError(
                f"{place} of the storage root block names {text!r}, which is no absolute path of a folder on this "
                "machine. Mount the storage here, or edit the block."
            )
        return root


def resolve_run_root(run_root: str) -> str:
    """Return the folder behind a run root of the run form: the text itself, or what the block that it names says.

    Raises:
        ConfigurationError: There is no such block, or its folder is not on this machine.
    """
    if not run_root.startswith(PREFIX):
        return run_root
    name = run_root.removeprefix(PREFIX)
    try:
        block = cast("StorageRootBlock", StorageRootBlock.load(name))
    except ValueError as exc:
        raise ConfigurationError(
            f"there is no block {StorageRootBlock.get_block_type_slug()}/{name} on the Prefect server. Make it under "
            "Blocks in the UI, or give run_root as a path."
        ) from exc
    return str(block.read_root())
