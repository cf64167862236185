"""Task: summary and report of a run, whether it is finished or not."""

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from eagle3.report import write_report, write_summary
from tasks.job import Job
from tasks.progress import artifact_key


@task(name="report", task_run_name="report", retries=0, cache_policy=NO_CACHE)
def publish_report(job: Job) -> None:
    """Write summary.json and report.html and show both in the Prefect UI."""
    summary = write_summary(job.run)
    write_report(job.run)
    name = job.recipe.name
    create_link_artifact(
        link=job.run.report_path.as_uri(),
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
