"""Task: summary and report of a run, whether it is finished or not."""

import os
from pathlib import Path
from urllib.parse import quote

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from eagle3.report import write_report, write_summary
from tasks.job import Job
from tasks.progress import artifact_key


def report_address(path: Path) -> str:
    """Return an address of a report that a browser opens: over HTTP when reports are served, else the file itself.

    `EAGLE3_REPORT_URL` is where a worker's reports are served, `EAGLE3_REPORT_ROOT` the folder that is served there.
    """
    url, root = os.environ.get("EAGLE3_REPORT_URL"), os.environ.get("EAGLE3_REPORT_ROOT")
    if url and root and path.is_relative_to(root):
        return f"{url.rstrip('/')}/{quote(path.relative_to(root).as_posix())}"
    return path.as_uri()


@task(name="report", task_run_name="report", retries=0, cache_policy=NO_CACHE)
def publish_report(job: Job) -> None:
    """Write summary.json and report.html and show both in the Prefect UI."""
    summary = write_summary(job.run)
    write_report(job.run)
    name = job.recipe.name
    create_link_artifact(
        link=report_address(job.run.report_path),
        link_text=f"report of {job.recipe.run_name}",
        key=artifact_key("report", name),
        description="One self-contained HTML file: spend, tokens, losses, acceptance.",
    )
    rows = "\n".join(f"| {key} | {value} |" for key, value in summary.items() if isinstance(value, (str, int, float)))
    create_markdown_artifact(
        markdown=f"# {job.recipe.run_name}\n\n| figure | value |\n|---|---|\n{rows}\n",
        key=artifact_key("summary", name),
        description="Samples, tokens, dollars and acceptance of this run.",
    )
