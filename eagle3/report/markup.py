"""HTML pieces of the report: escaped text, tables, cards, the page frame, and what must not leave the machine."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import cast

_SECRET = re.compile(r"\b(sk|hf|ghp|xox[abp]|key)[-_][A-Za-z0-9_-]{12,}|(?i:\bbearer)\s+\S{8,}")
_ABSOLUTE_PATH = re.compile(r"(?<![\w./:~-])(?:~|/)(?:[\w.+@-]+)?/(?:[\w.+@=-]+/)*([\w.+@=-]+)")

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1c1c1a;--soft:#66655f;--line:#e2e1dc;--good:#147a4a;
--bad:#b3261e;--warn:#8a5a00;--c0:#2a6fc9;--c1:#d9622b;--c2:#1a9a6c;--c3:#c79200;--c4:#8b5bd0;--c5:#c9447e;--c6:#3d8f9c;
--c7:#7a776c}
@media(prefers-color-scheme:dark){:root{--bg:#161615;--card:#1f1f1d;--ink:#ececea;--soft:#a3a29b;--line:#383733;
--good:#5cc792;--bad:#f2877f;--warn:#e2b04a;--c0:#5c9ceb;--c1:#ee8a5a;--c2:#3fc092;--c3:#e0b437;--c4:#ae8af0;
--c5:#ec7aa9;--c6:#63b9c6;--c7:#a09d92}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:28px 20px 60px;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:26px;margin:0 0 2px}h2{font-size:18px;margin:36px 0 10px}
p.lead,.none,.note{color:var(--soft)}p{margin:4px 0 10px}
section{margin-top:8px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px;margin-top:18px}
.card,figure{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px;margin:0}
.card b{display:block;font-size:22px;font-weight:650;line-height:1.3}.card span{color:var(--soft);font-size:13px}
.card small{display:block;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:12px;align-items:start}
figcaption{font-weight:600;font-size:14px;margin-bottom:6px}svg{display:block;width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:13px;color:var(--soft);margin-top:4px}
.legend span{display:inline-flex;align-items:center;gap:6px}
.legend i{width:11px;height:11px;border-radius:3px;background:var(--c)}
.tick,.value{font-size:11.5px;fill:var(--soft)}.label{font-size:12px;fill:var(--soft)}.value{fill:var(--ink)}
.inside{font-size:11.5px;fill:var(--card);font-weight:600}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}.bar{fill:var(--c)}
.area{fill:var(--c);opacity:.22}.dot{fill:var(--c);opacity:0}.dot:hover{opacity:1}
.s0{--c:var(--c0)}.s1{--c:var(--c1)}.s2{--c:var(--c2)}.s3{--c:var(--c3)}.s4{--c:var(--c4)}.s5{--c:var(--c5)}
.s6{--c:var(--c6)}.s7{--c:var(--c7)}
.scroll{overflow-x:auto;margin-top:12px}
table{border-collapse:collapse;width:100%;background:var(--card);border:1px solid var(--line)}
th,td{padding:6px 10px;text-align:left;border-bottom:1px solid var(--line);vertical-align:top;font-size:14px}
th{color:var(--soft);font-weight:600}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
pre{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px;overflow:auto;font-size:13px}
code{overflow-wrap:anywhere}details{margin-top:12px}details summary{cursor:pointer;color:var(--soft)}
"""


def without_secrets(text: str) -> str:
    """Return text without what looks like a key, and with absolute paths cut to their last part."""
    return _ABSOLUTE_PATH.sub(r"…/\1", _SECRET.sub("[removed]", text))


def card(heading: str, figure: str, note: str = "") -> str:
    """Return one headline number."""
    below = f"<small>{escape(note)}</small>" if note else ""
    return f'<div class="card"><span>{escape(heading)}</span><b>{escape(figure)}</b>{below}</div>'


def section(anchor: str, heading: str, *parts: str) -> str:
    """Return a section; one without content says that it has none yet."""
    body = "".join(part for part in parts if part) or '<p class="none">not yet</p>'
    return f'<section id="{anchor}"><h2>{escape(heading)}</h2>{body}</section>'


def charts(*pictures: str) -> str:
    """Return charts side by side where there is room; nothing for none."""
    drawn = "".join(picture for picture in pictures if picture)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def note(text: str) -> str:
    """Return a sentence in the background."""
    return f'<p class="note">{escape(text)}</p>'


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], numeric: Sequence[int] = ()) -> str:
    """Return a table of escaped cells; columns in `numeric` are set right. Nothing when there are no rows."""
    if not rows:
        return ""

    def cell(tag: str, column: int, value: object) -> str:
        text = _shown(value)
        kind = "n" if column in numeric else _TONES.get(text, "") if tag == "td" else ""
        opened = f'<{tag} class="{kind}">' if kind else f"<{tag}>"
        return f"{opened}{escape(text)}</{tag}>"

    head = "".join(cell("th", column, text) for column, text in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(cell("td", column, value) for column, value in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


_TONES = {
    "complete": "good",
    "passed": "good",
    "failed": "bad",
    "unreadable": "bad",
    "critical": "bad",
    "partial": "warn",
    "paused": "warn",
    "drifted": "warn",
}
"""Words that are coloured when a cell holds nothing else."""


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value)


def flat(value: object) -> str:
    """Return a JSON value as one line for people, without secrets; numbers have four digits."""
    if isinstance(value, Mapping):
        found = cast("Mapping[str, object]", value)
        return without_secrets(", ".join(f"{key} {flat(item)}" for key, item in found.items()))
    if isinstance(value, (list, tuple)):
        return ", ".join(flat(item) for item in cast("Sequence[object]", value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else without_secrets(str(value))


def page(title: str, lead: str, body: str) -> str:
    """Return the whole document; it refers to nothing outside itself."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f'<body><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{body}</body></html>\n'
    )
