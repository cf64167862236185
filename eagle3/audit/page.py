"""The audit report as one self-contained HTML page. Pure: a report in, text out."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from eagle3.audit.verdict import PASSED
from eagle3.records import AuditReport

RULES: Mapping[str, str] = {
    "A01": "End token once, last, when the model ended",
    "A02": "Reasoning closed once, in its place",
    "A03": "No control id inside text, no unknown id",
    "A04": "Ids decode to the text of the reply",
    "A05": "As many ids as were billed",
    "A06": "No constant offset against the bill",
    "A07": "Provider habits identified",
    "A08": "Prompt ids as billed",
    "A09": "No undecided space at the edge of a text",
    "A10": "No damaged characters",
    "A11": "No control-token text in the reply",
    "A12": "Tool calls whole and declared",
    "A13": "Answer not empty",
    "A14": "Ended by the model, not cut",
    "A15": "No overlong runs",
    "A16": "Reasoning where it belongs",
    "A17": "Text in the tokenizer's normal form",
    "A18": "No repetition loop",
    "A19": "Allowed provider, precision and model",
    "A20": "Reported reasoning tokens",
    "A21": "No control-token text in the prompt",
}
"""What each rule asks for, for people."""
SEVERITIES = ("critical", "error", "warning", "info")
MAX_ROWS = 100
BAR_WIDTH = 28
CHART_HEIGHT = 120

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;color:#1d2330}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}
td,th{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #dfe3ea;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.critical{color:#a40e26;font-weight:600}.error{color:#b35900}.passed{color:#116329}.failed{color:#a40e26}
figure{display:inline-block;margin:0 2rem 1rem 0}figcaption{font-size:.85rem}
"""


def render_page(report: AuditReport) -> str:
    """Return the page: verdict, findings by rule and by provider, count differences, and the findings themselves."""
    kept = f"{report.num_kept} of {report.num_samples} samples kept"
    is_passed = report.verdict == PASSED
    sections = [
        f'<h1>Audit: <span class="{"passed" if is_passed else "failed"}">{escape(report.verdict)}</span></h1>',
        f"<p>{kept}, {len(report.dropped)} dropped.</p>",
        "<h2>Findings by rule</h2>",
        _table(
            ("Rule", "Asks for", *SEVERITIES),
            (
                (rule, RULES.get(rule, ""), *(str(counts.get(severity, "")) for severity in SEVERITIES))
                for rule, counts in report.counts.items()
            ),
            first_number=2,
        ),
        "<h2>Findings by provider</h2>",
        _provider_table(report),
        "<h2>How sure the ids are</h2>",
        _table(
            ("Grade", "Samples"), ((grade, str(count)) for grade, count in report.exactness.items()), first_number=1
        ),
        "<h2>Rebuilt minus billed completion ids</h2>",
        "".join(_histogram(provider, counts) for provider, counts in report.delta_by_provider.items())
        or "<p>All ids came from the server, or nothing was billed.</p>",
        "<h2>Findings</h2>",
        _finding_table(report),
    ]
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Audit report</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _provider_table(report: AuditReport) -> str:
    rules = sorted({rule for counts in report.counts_by_provider.values() for rule in counts})
    rows = (
        (provider, *(str(counts.get(rule, "")) for rule in rules))
        for provider, counts in report.counts_by_provider.items()
    )
    return _table(("Provider", *rules), rows, first_number=1)


def _finding_table(report: AuditReport) -> str:
    shown = report.findings[:MAX_ROWS]
    rows = ((each.severity.value, each.rule, each.provider or "", each.sample_id or "", each.detail) for each in shown)
    total = sum(count for counts in report.counts.values() for count in counts.values())
    rest = f"<p>{total - len(shown)} more are counted above; report.json lists more of them.</p>"
    table = _table(("Severity", "Rule", "Provider", "Sample", "Detail"), rows, first_number=99, class_column=0)
    return table + (rest if total > len(shown) else "")


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, first_number: int, class_column: int | None = None
) -> str:
    def cell(tag: str, index: int, text: str, row: Sequence[str]) -> str:
        names = ["n"] if index >= first_number else []
        if class_column is not None and tag == "td" and index == class_column:
            names.append(row[class_column])
        attribute = f' class="{escape(" ".join(names))}"' if names else ""
        return f"<{tag}{attribute}>{escape(text)}</{tag}>"

    def line(tag: str, row: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, index, text, row) for index, text in enumerate(row))}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table>" if body else "<p>None.</p>"


def _histogram(provider: str, counts: Mapping[str, int]) -> str:
    """Return a bar chart of count differences, one bar per difference, heights relative to the tallest."""
    deltas = sorted(counts, key=int)
    tallest = max(counts.values())
    width = (BAR_WIDTH + 6) * len(deltas) + 6
    bars: list[str] = []
    for index, delta in enumerate(deltas):
        height = max(1.0, CHART_HEIGHT * counts[delta] / tallest)
        left, top = 6 + index * (BAR_WIDTH + 6), 14 + CHART_HEIGHT - height
        middle = left + BAR_WIDTH / 2
        colour = "#2f6f4f" if delta == "0" else "#b35900"
        bars.append(
            f'<rect x="{left}" y="{top:.1f}" width="{BAR_WIDTH}" height="{height:.1f}" fill="{colour}"/>'
            f'<text x="{middle}" y="{top - 3:.1f}" text-anchor="middle">{counts[delta]}</text>'
            f'<text x="{middle}" y="{CHART_HEIGHT + 28}" text-anchor="middle">{int(delta):+d}</text>'
        )
    return (
        f'<figure><svg width="{width}" height="{CHART_HEIGHT + 34}" font-size="10" role="img" '
        f'aria-label="Count differences of {escape(provider, quote=True)}">{"".join(bars)}</svg>'
        f"<figcaption>{escape(provider)}</figcaption></figure>"
    )
