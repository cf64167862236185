"""How commands tell about errors: a message on standard error and the exit code that the error's class names."""

from collections.abc import Generator
from contextlib import contextmanager

import typer
from rich.console import Console

from eagle3.errors import Eagle3Error

notes = Console(stderr=True)
"""Everything but results."""


@contextmanager
def reported() -> Generator[None]:
    """Turn errors into a message and the exit code their class names."""
    try:
        yield
    except Eagle3Error as exc:
        notes.print(f"[bold red]{type(exc).__name__}[/]: ", end="", highlight=False)
        notes.print(str(exc), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(exc.exit_code) from exc
    except OSError as exc:
        advice = "Everything finished is kept; make room or correct the path, then run the same command again."
        notes.print(f"[bold red]{type(exc).__name__}[/]: ", end="", highlight=False)
        notes.print(f"{exc}. {advice}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from exc
    except KeyboardInterrupt as exc:
        notes.print("stopped. Everything finished is kept; run the same command to continue.")
        raise typer.Exit(3) from exc
