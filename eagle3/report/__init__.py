"""What people and programs are told about a run: status, summary and the HTML report.

Reads the manifests and files of all stages and imports none of them; works on runs that are half done. Making the
recipe's reference page lives here too (`recipe_docs`).
"""

from eagle3.report.page import build_report, write_report
from eagle3.report.reading import is_data_shard
from eagle3.report.rendering import render_status, render_summary
from eagle3.report.status import (
    DatasetRow,
    LastProgress,
    RunStatus,
    Spend,
    StageRow,
    StageState,
    run_status,
)
from eagle3.report.summary import build_summary, read_summary, write_summary

__all__ = [
    "DatasetRow",
    "LastProgress",
    "RunStatus",
    "Spend",
    "StageRow",
    "StageState",
    "build_report",
    "build_summary",
    "is_data_shard",
    "read_summary",
    "render_status",
    "render_summary",
    "run_status",
    "write_report",
    "write_summary",
]
