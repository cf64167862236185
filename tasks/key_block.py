"""The Prefect block for an API key: the masked key itself, or only where the workers find it."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from eagle3.errors import CredentialsError
from eagle3.recipe import Simulator
from tasks.job import Job


class ApiKeyBlock(Block):
    """Where the API key of a provider comes from; exactly one field is filled in."""

    _block_type_name = "eagle3 API key"
    _block_type_slug = "eagle3-api-key"
    _description = "API key of OpenRouter or another provider: the masked value, or the place where workers find it."

    value: SecretStr = Field(default=SecretStr(""), description="The key. Kept encrypted and shown masked.")
    environment_variable: str = Field(default="", description="Name of a variable in the environment of the workers.")
    file: str = Field(default="", description="Path of a file on the workers that holds the key and nothing else.")

    def read_key(self) -> str:
        """Return the key.

        Raises:
            CredentialsError: No field or several are filled in, or there is no key where the field points.
        """
        value = self.value.get_secret_value()
        filled = [text for text in (value, self.environment_variable, self.file) if text]
        if len(filled) != 1:
            raise CredentialsError(
                f"an API key block needs exactly one of value, environment_variable and file, found {len(filled)}. "
                "Edit the block in the Prefect UI."
            )
        if self.environment_variable:
            value = os.environ.get(self.environment_variable, "")
        elif self.file:
            path = Path(self.file)
            value = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        if not value:
            place = self.environment_variable or Path(self.file).name
            raise CredentialsError(f"there is no key in {place!r} on this worker. Put it there, or edit the block.")
        return value


@contextmanager
def key_in_environment(job: Job, block_name: str) -> Generator[None]:
    """Put the key of a block where the recipe looks for it, for as long as the block lasts; an empty name does nothing.

    Raises:
        CredentialsError: There is no such block, or it holds no key.
    """
    provider = job.recipe.generation.provider
    name = None if isinstance(provider, Simulator) else getattr(provider, "api_key_env", None)
    if not block_name or name is None:
        yield
        return
    try:
        block = cast("ApiKeyBlock", ApiKeyBlock.load(block_name))
    except ValueError as exc:
        raise CredentialsError(
            f"there is no block {ApiKeyBlock.get_block_type_slug()}/{block_name} on the Prefect server. Make it under "
            "Blocks in the UI, or leave key_block empty to use the environment of the worker."
        ) from exc
    earlier = os.environ.get(name)
    os.environ[name] = block.read_key()
    try:
        yield
    finally:
        if earlier is None:
            del os.environ[name]
        else:
            os.environ[name] = earlier
