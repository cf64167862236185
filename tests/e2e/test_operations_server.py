"""A server with a password, its workers, and what `eagle3 doctor` says while the set-up grows."""

import json
from collections.abc import Generator
from typing import Any

import httpx
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings

from tests.e2e.command_line import CommandLine
from tests.e2e.deployed import KEY_BLOCK, OPERATIONS_ONLY, PLANTED_KEY, Deployed

pytestmark = [pytest.mark.slow, OPERATIONS_ONLY]

PASSWORD = "admin:planted-password-of-the-server"


@pytest.fixture
def line(tmp_path_factory: pytest.TempPathFactory) -> Generator[CommandLine]:
    line = CommandLine(
        tmp_path_factory.mktemp("guarded"), {"PREFECT_SERVER_API_AUTH_STRING": PASSWORD, "OPENROUTER_API_KEY": ""}
    )
    yield line
    line("down")


def examine(line: CommandLine) -> dict[str, dict[str, Any]]:
    done = line("doctor", "--json")
    assert PASSWORD not in done.stdout + done.stderr
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == (0 if all(finding["is_good"] for finding in found.values()) else 2)
    return found


def test_a_server_with_a_password_serves_those_who_know_it(line: CommandLine) -> None:
    assert examine(line)["Prefect server"]["found"] == "no server runs"
    assert line("deploy").returncode == 0
    found = examine(line)
    assert found["deployments"]["is_good"]
    assert "no worker is online for eagle3-io, eagle3-cpu, eagle3-gpu" in found["workers"]["found"]
    assert not found["API key"]["is_good"]

    done = line("up")
    assert done.returncode == 0, done.stderr[-3000:]
    url = done.stdout.strip()
    assert httpx.get(f"{url}/api/admin/version").status_code == httpx.codes.UNAUTHORIZED
    with temporary_settings({PREFECT_API_AUTH_STRING: PASSWORD}):
        deployed = Deployed(line, url)
        deployed.make_block("eagle3-api-key", KEY_BLOCK, {"value": PLANTED_KEY})
        deployed.call("janitor")  # a worker and its flow run reach the server
    found = examine(line)
    assert found["API key"]["found"] == f"block {KEY_BLOCK}"
    assert all(finding["is_good"] for finding in found.values()), found
    for path in line.home.rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes(), path.name
