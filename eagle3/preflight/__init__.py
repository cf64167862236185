"""What is checked before money is spent: tokens, machine and, on request, the endpoints themselves."""

from eagle3.preflight.checks import Check, Outcome, PreflightReport, render_checks
from eagle3.preflight.report import (
    check_before_spending,
    probe_checks,
    probe_endpoints,
    require_environment,
    run_checks,
    settled_habits,
)

__all__ = [
    "Check",
    "Outcome",
    "PreflightReport",
    "check_before_spending",
    "probe_checks",
    "probe_endpoints",
    "render_checks",
    "require_environment",
    "run_checks",
    "settled_habits",
]
