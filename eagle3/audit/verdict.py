"""From findings to a verdict: who is dropped, what is counted, whether the run may go on. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from eagle3.audit.provider_rules import Evidence
from eagle3.records import AuditFinding, AuditReport, Exactness, Severity

PASSED = "passed"
FAILED = "failed"
MAX_LISTED = 200
"""Findings listed per rule and severity; all are counted."""
MAX_SHOWN = 5
_DROPPING = (Severity.CRITICAL, Severity.ERROR)


def judge(findings: Sequence[AuditFinding], evidence: Sequence[Evidence]) -> AuditReport:
    """Count findings, drop samples with an error, and fail on anything critical.

    Args:
        findings: Of all rules, in any order.
        evidence: One entry per sample.
    """
    ordered = sorted(findings, key=_weight)
    dropped: dict[str, str] = {}
    for finding in ordered:
        if finding.sample_id is not None and finding.severity in _DROPPING:
            dropped.setdefault(finding.sample_id, finding.rule)
    counts = _nested((finding.rule, finding.severity.value) for finding in ordered)
    deltas = _nested((each.provider, str(each.delta)) for each in evidence if each.delta is not None)
    exactness = Counter(each.exactness.value for each in evidence)
    return AuditReport(
        num_samples=len(evidence),
        num_kept=len(evidence) - len(dropped),
        verdict=FAILED if any(finding.severity is Severity.CRITICAL for finding in ordered) else PASSED,
        counts=counts,
        counts_by_provider=_nested(
            (finding.provider, finding.rule) for finding in ordered if finding.provider is not None
        ),
        exactness={grade.value: exactness[grade.value] for grade in Exactness if exactness[grade.value]},
        delta_by_provider={
            provider: dict(sorted(numbers.items(), key=lambda item: int(item[0])))
            for provider, numbers in deltas.items()
        },
        findings=_listed(ordered),
        dropped=dict(sorted(dropped.items())),
    )


def describe_failure(report: AuditReport, report_path: str) -> str:
    """Return the message for a failed audit: rules, providers, counts, and where to read on.

    Args:
        report: Of a failed audit.
        report_path: Relative to the run directory.
    """
    critical = [finding for finding in report.findings if finding.severity is Severity.CRITICAL]
    groups: defaultdict[tuple[str, str], list[AuditFinding]] = defaultdict(list)
    for finding in critical:
        groups[finding.rule, finding.provider or "the whole run"].append(finding)
    lines = [
        f"{rule}, {provider}: {found[0].detail}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")
        for (rule, provider), found in groups.items()
    ]
    more = f"\n  … and {len(lines) - MAX_SHOWN} more" if len(lines) > MAX_SHOWN else ""
    return (
        f"the audit of {report.num_samples} samples failed:\n  "
        + "\n  ".join(lines[:MAX_SHOWN])
        + f"{more}\nRead {report_path!r} in the run directory. Correct the grammar or the target and run "
        "'eagle3 reconstruct' and 'eagle3 audit' again (the answers are kept), or set audit.stop_on_critical to "
        "false to go on with what is left."
    )


def _weight(finding: AuditFinding) -> tuple[int, str, str, str]:
    ranks = list(reversed(Severity))
    return ranks.index(finding.severity), finding.rule, finding.provider or "", finding.sample_id or ""


def _listed(ordered: Iterable[AuditFinding]) -> list[AuditFinding]:
    seen: Counter[tuple[str, Severity]] = Counter()
    listed: list[AuditFinding] = []
    for finding in ordered:
        seen[finding.rule, finding.severity] += 1
        if seen[finding.rule, finding.severity] <= MAX_LISTED:
            listed.append(finding)
    return listed


def _nested(pairs: Iterable[tuple[str, str]]) -> Mapping[str, Mapping[str, int]]:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outer, inner in pairs:
        counts[outer][inner] += 1
    return {outer: dict(sorted(counts[outer].items())) for outer in sorted(counts)}
