"""Serves the reports of runs over HTTP on loopback, so that links in the Prefect UI open.

Only files named below are served; prompts, answers and journals stay where they are.
"""

import argparse
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

SERVED = frozenset({"report.html", "summary.json"})


class ReportHandler(SimpleHTTPRequestHandler):
    """Answers requests for reports and nothing else."""

    def translate_path(self, path: str) -> str:
        """Return the file behind an address; one that is not served leads nowhere."""
        root = Path(self.directory).resolve()
        wanted = (root / unquote(urlsplit(path).path).lstrip("/")).resolve()
        is_served = wanted.name in SERVED and wanted.is_relative_to(root) and wanted.is_file()
        return str(wanted if is_served else root / ".not-served")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the standard library
        """Write no log."""


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description="Serve the reports of runs on loopback.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--root", type=Path, required=True, help="Folder above the run directories.")
    parser.add_argument("--host", default="127.0.0.1", help="Another address only inside a container.")
    arguments = parser.parse_args()
    handler = partial(ReportHandler, directory=str(arguments.root))
    ThreadingHTTPServer((arguments.host, arguments.port), handler).serve_forever()


if __name__ == "__main__":
    main()
