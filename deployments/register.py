"""Putting work pool and deployments on the configured Prefect server, as often as you like."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from deployments.server import POOL
from eagle3.errors import ConfigurationError

PROJECT = Path(__file__).resolve().parent.parent


def register(say: Callable[[str], None]) -> None:
    """Create the work pool when it is missing, then register every deployment of prefect.yaml.

    Raises:
        ConfigurationError: The server refused, or prefect.yaml is not there.
    """
    if not (PROJECT / "prefect.yaml").is_file():
        raise ConfigurationError("prefect.yaml is not beside the installed package; run this from a project checkout.")
    _prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
    _prefect("--no-prompt", "deploy", "--all")
    say(f"work pool {POOL!r} and the deployments of prefect.yaml are registered")


def _prefect(*arguments: str) -> None:
    environment = {**os.environ, "PWD": str(PROJECT), "PREFECT_CLI_PROMPT": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise ConfigurationError(
            f"'prefect {' '.join(arguments)}' ended with {done.returncode}: {' '.join(lines[-5:])}"
        )
