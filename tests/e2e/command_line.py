"""Running `eagle3` as people do."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
RECIPE = PROJECT / "deployments" / "recipes" / "tiny_cpu.yaml"


@dataclass(frozen=True)
class CommandLine:
    """Runs `eagle3` as people do, in a process of its own, with a home of its own."""

    home: Path
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further environment variables."""

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        return {
            **kept,
            "EAGLE3_HOME": str(self.home),
            "COLUMNS": "120",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            **self.extra,
        }

    def command(self, *arguments: str) -> list[str]:
        return [str(Path(sys.executable).parent / "eagle3"), *arguments]

    def __call__(self, *arguments: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=self.environment,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        done = self(*arguments)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment,
            cwd=self.home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def overrides(values: Sequence[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]
