"""A simulator in a process of its own, for flows, demonstrations and tests."""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import httpx

from eagle3.errors import ConfigurationError

STOP_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 30.0
_ERROR_TAIL_BYTES = 2000


class SimulatorProcess:
    """Starts `python -m eagle3.simulator`, waits until it accepts requests, and stops it.

    The child watches its standard input, so it ends even when this process is killed. Use as a context manager, or
    call `start` and `stop`.
    """

    def __init__(
        self,
        scenario: Path,
        answers: Sequence[Path] = (),
        *,
        tokenizer: Path | None = None,
        grammar: str | None = None,
        mode: str | None = None,
        live: Path | None = None,
        state: Path | None = None,
        port: int = 0,
        time_scale: float | None = None,
        ready_timeout_s: float = 60.0,
    ) -> None:
        """Say what to start; nothing starts yet.

        Args:
            scenario: Scenario file.
            answers: Recorded answer files.
            tokenizer: Model directory, needed to cut recorded answers and for scripted ones.
            grammar: Response grammar of scripted answers.
            mode: Mode of the grammar; null takes its first.
            live: Model directory that answers what nobody recorded.
            state: File that keeps account, cache and generations over a restart.
            port: 0 takes a free one; a restart on the same address needs a number.
            time_scale: Overrides the scenario's.
            ready_timeout_s: How long to wait for the start.
        """
        self._arguments = [sys.executable, "-m", "eagle3.simulator", "--exit-with-stdin"]
        self._arguments += ["--scenario", str(scenario), "--port", str(port)]
        if answers:
            self._arguments += ["--answers", *map(str, answers)]
        for option, value in (
            ("--tokenizer", tokenizer),
            ("--grammar", grammar),
            ("--mode", mode),
            ("--live", live),
            ("--state", state),
            ("--time-scale", time_scale),
        ):
            if value is not None:
                self._arguments += [option, str(value)]
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._ready: dict[str, Any] = {}

    @property
    def base_url(self) -> str:
        """Base address of the API, without a trailing slash."""
        return cast("str", self._ready["base_url"])

    @property
    def admin_url(self) -> str:
        """Base address of the admin endpoints, without a trailing slash."""
        return cast("str", self._ready["admin_url"])

    @property
    def admin_token(self) -> str:
        """Bearer token of the admin endpoints."""
        return cast("str", self._ready["admin_token"])

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return cast("int", self._ready["pid"])

    def start(self) -> Self:
        """Start the child and wait until it accepts requests.

        Raises:
            ConfigurationError: It ended, or said nothing for `ready_timeout_s`; its error output is in the message.
        """
        self._errors = cast("IO[bytes]", tempfile.TemporaryFile())  # noqa: SIM115 (closed in stop)
        # A session of its own: Ctrl-C is for this process, which may still want answers while it stops.
        self._process = subprocess.Popen(
            self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        output = self._process.stdout
        assert output is not None, "a pipe was asked for"
        # Ends the blocking read below by ending the child, whose output pipe then closes.
        watchdog = threading.Timer(self._ready_timeout_s, self._process.kill)
        watchdog.start()
        try:
            line = output.readline()
        finally:
            watchdog.cancel()
        try:
            self._ready = cast("dict[str, Any]", json.loads(line))
        except ValueError as exc:
            said = self._error_tail()
            self.stop()
            raise ConfigurationError(
                f"the simulator did not start within {self._ready_timeout_s:g} s: {said or 'it said nothing'}"
            ) from exc
        return self

    def stop(self) -> None:
        """End the child and wait for it; harmless when it has ended."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def kill(self) -> None:
        """End the child without warning, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stats(self) -> dict[str, Any]:
        """Counters of the simulator."""
        return self._admin("GET", "stats")

    def truth(self) -> dict[str, dict[str, Any]]:
        """What each generation really was, by generation id."""
        return cast("dict[str, dict[str, Any]]", self._admin("GET", "truth")["generations"])

    def topup(self, amount_usd: Decimal) -> None:
        """Add credits."""
        self._admin("POST", "topup", {"usd": str(amount_usd)})

    def set_key_limit(self, limit_usd: Decimal | None) -> None:
        """Change what the key may spend in all; null lifts the limit."""
        self._admin("POST", "key_limit", {"usd": None if limit_usd is None else str(limit_usd)})

    def reset(self) -> None:
        """Start the account, the cache and the attempts afresh."""
        self._admin("POST", "reset", {})

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _admin(self, method: str, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        reply = httpx.request(
            method,
            f"{self.admin_url}/{name}",
            headers={"Authorization": f"Bearer {self.admin_token}"},
            json=body,
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
        )
        reply.raise_for_status()
        return cast("dict[str, Any]", reply.json())

    def _error_tail(self) -> str:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._errors is None:
            return ""
        self._errors.seek(0)
        return self._errors.read()[-_ERROR_TAIL_BYTES:].decode(errors="replace").strip()
