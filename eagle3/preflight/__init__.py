"""What is checked before money is spent: tokens, machine and, on request, the endpoints themselves."""

from eagle3.preflight.checks import PreflightReport, render_checks
from eagle3.preflight.report import (
    check_before_spending,
    check_offline,
    probe_checks,
    probe_endpoints,
    require_environment,
    run_checks,
    settled_habits,
)
from eagle3.tokens.checklist import Check, Outcome

__all__ = [
    "Check",
    "Outcome",
    "PreflightReport",
    "check_before_spending",
    "check_offline",
    "probe_checks",
    "probe_endpoints",
    "render_checks",
    "require_environment",
    "run_checks",
    "settled_habits",
]
