"""One home for the whole session: a real Prefect server and the converted small model."""

from collections.abc import Generator

import pytest

from tests.e2e.command_line import CommandLine
from tests.e2e.deployed import Deployed, operate


@pytest.fixture(scope="session")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Generator[CommandLine]:
    """The command line over one Prefect server for all tests; the server is stopped at the end."""
    line = CommandLine(tmp_path_factory.mktemp("home"))
    yield line
    line("down")


@pytest.fixture(scope="session")
def deployed(eagle3: CommandLine) -> Generator[Deployed]:
    """Server, workers and blocks for the tests of operation."""
    yield from operate(eagle3)
