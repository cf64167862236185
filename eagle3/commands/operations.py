"""Commands for the Prefect side: server, workers, deployments, and a check of the whole set-up."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eagle3.errors import ConfigurationError, Eagle3Error

notes = Console(stderr=True)


@contextmanager
def _reported() -> Generator[None]:
    try:
        yield
    except Eagle3Error as exc:
        notes.print(f"[bold red]{type(exc).__name__}[/]: ", end="", highlight=False)
        notes.print(str(exc), markup=False, highlight=False)
        raise typer.Exit(exc.exit_code) from exc


def up() -> None:
    """Start a local Prefect server and workers with our settings, and register the deployments."""
    with _reported():
        from deployments.server import ensure_server, project_home, start_workers

        with notes.status("starting the Prefect server"):
            url = ensure_server()
        from deployments.register import register

        register(_say)
        start_workers(project_home())
        sys.stdout.write(f"{url}\n")


def down() -> None:
    """Stop the local Prefect server and workers."""
    with _reported():
        from deployments.server import project_home, stop_all

        stopped = stop_all(project_home())
        sys.stdout.write(f"stopped: {', '.join(stopped) or 'nothing was running'}\n")


def deploy() -> None:
    """Register work pools, deployments, blocks and automations with the Prefect server; says what changed."""
    with _reported():
        from deployments.server import ensure_server

        ensure_server()
        from deployments.register import register

        register(lambda line: Console().print(line, highlight=False, markup=False, soft_wrap=True))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check of `eagle3 doctor`."""

    check: str
    is_good: bool
    found: str
    advice: str = ""


def doctor(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON for programs.")] = False
) -> None:
    """Check the whole set-up and say what to do. Starts and changes nothing."""
    findings = _findings()
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    else:
        table = Table("check", "", "found", "what to do")
        for finding in findings:
            table.add_row(finding.check, "ok" if finding.is_good else "[red]no[/]", finding.found, finding.advice)
        Console().print(table)
    if not all(finding.is_good for finding in findings):
        raise typer.Exit(2)


def _findings() -> list[Finding]:
    """Make every check; what lies on the server is looked for only when there is a server to ask."""
    server = _checked("Prefect server", _server)
    findings = [server]
    for name, check in _ON_THE_SERVER.items():
        if server.is_good:
            findings.append(_checked(name, check))
        else:
            findings.append(Finding(check=name, is_good=False, found="not known", advice="The server comes first"))
    findings.append(_checked("API key", lambda: _key(has_server=server.is_good)))
    return [*findings, *(_checked(name, check) for name, check in _HERE.items())]


def _checked(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(check=name, is_good=True, found=check())
    except ConfigurationError as exc:
        found, _, advice = str(exc).partition(". ")
        return Finding(check=name, is_good=False, found=found, advice=advice)


def _server() -> str:
    from deployments.server import check_server, project_home, running_server

    configured = os.environ.get("PREFECT_API_URL")
    if configured:
        return f"{configured}, version {check_server(configured)}"
    local = running_server(project_home())
    if local is None:
        raise ConfigurationError("no server runs. Start one with 'eagle3 up', or set PREFECT_API_URL")
    return f"{local.url}, version {check_server(f'{local.url}/api')}"


def _registered() -> str:
    from deployments.server import ensure_server

    ensure_server()
    from deployments.inspection import missing_deployments

    missing = missing_deployments()
    if missing:
        raise ConfigurationError(f"deployments are missing: {', '.join(missing[:5])}. Run 'eagle3 deploy'")
    return "all deployments are registered"


def _workers() -> str:
    from deployments.server import ensure_server

    ensure_server()
    from deployments.inspection import pools_without_worker

    idle = pools_without_worker()
    if idle:
        raise ConfigurationError(
            f"no worker is online for {', '.join(idle)}. Run 'eagle3 up', or on each machine 'prefect worker start "
            "--pool POOL --type process'"
        )
    return "a worker is online for every pool"


def _key(*, has_server: bool) -> str:
    if os.environ.get("OPENROUTER_API_KEY"):
        return "OPENROUTER_API_KEY is set"
    if has_server:
        from deployments.server import ensure_server

        ensure_server()
        from deployments.inspection import key_blocks

        names = key_blocks()
        if names:
            return f"block {', '.join(names)}"
    raise ConfigurationError(
        "no API key here. Set OPENROUTER_API_KEY where the workers start, or make a block of type 'eagle3 API key'; "
        "rehearsals against the look-alike need none"
    )


def _training() -> str:
    missing = [name for name in ("torch", "transformers", "speculators") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} not installed. Extract, train, evaluate and export need them: see docs/install.md"
        )
    return "torch, transformers and speculators are installed"


def _file_system() -> str:
    from eagle3.file_system import check_file_system

    root = Path.cwd()
    check_file_system(root)
    free_gb = shutil.disk_usage(root).free / 1e9
    return f"locks and renames work here; {free_gb:,.0f} GB free"


def _say(line: str) -> None:
    notes.print(line, highlight=False, markup=False)


_ON_THE_SERVER: dict[str, Callable[[], str]] = {"deployments": _registered, "workers": _workers}
_HERE: dict[str, Callable[[], str]] = {"training libraries": _training, "file system": _file_system}
