"""Rules about one provider's answers in the order in which they came: what begins to go wrong while a run goes on.

The rules of a finished run look at shares of all answers; a habit that began an hour ago is a small share of them. Here
the newest answers of each kind are looked at by themselves, at two lengths. A few odd answers prove nothing: each rule
asks for so many that drift of single answers does not explain them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from eagle3.audit.provider_rules import EVERY_KIND, Evidence, lower_bound
from eagle3.recipe import Audit
from eagle3.records import AuditFinding, Exactness, Severity

NEWEST = (16, 64)
"""How many of the newest answers of a kind are looked at. Eight of sixteen answers that drifted by the same offset are
a matter of one in fifty thousand when one in twelve drifts so."""
MIN_OFFSETS = 6
"""Answers with one offset below which it may be chance, however few there are in all."""
CONSTANT_SHARE = 0.5
MIN_MISMATCH_SHARE = 0.4
"""Small models drift in a tenth of their answers and, early in a run, one dataset may come alone."""
MIN_PROMPT_SHARE = 0.1
"""Prompts have no drift, but a dataset of unusual prompts may come first; the audit of the finished run is stricter."""
SPACED_SHARE = 0.9
MIN_EDGES = 16
NUM_FIRST_EDGES = 64

ShiftRule: TypeAlias = Callable[[str, Sequence[Evidence], Audit], Iterator[AuditFinding]]


def offset_begins(provider: str, evidence: Sequence[Evidence], settings: Audit) -> Iterator[AuditFinding]:
    """A06, while a run goes on: one offset in at least half of the newest answers of a kind."""
    del settings
    judged = [each for each in evidence if each.is_judged]
    kinds = sorted({kind for each in judged for kind in each.kinds}, key=lambda kind: (kind != EVERY_KIND, kind))
    for kind in kinds:
        members = [each for each in judged if kind in each.kinds]
        for size in NEWEST:
            tail = members[-size:]
            wrong = [each.delta for each in tail if each.exactness is Exactness.MISMATCH and each.delta is not None]
            if not wrong:
                continue
            offset, count = Counter(wrong).most_common(1)[0]
            if count >= max(MIN_OFFSETS, math.ceil(CONSTANT_SHARE * len(tail))):
                earlier = members[: -len(tail)]
                before = sum(each.exactness is Exactness.MISMATCH and each.delta == offset for each in earlier)
                yield _critical(
                    "A06",
                    provider,
                    f"{count} of the newest {len(tail)} {kind} have {offset:+d} ids against the bill, {before} of the "
                    f"{len(earlier)} before: a habit that the profile does not know",
                )
                return


def mismatches_begin(provider: str, evidence: Sequence[Evidence], settings: Audit) -> Iterator[AuditFinding]:
    """A05, while a run goes on: counts disagree in most of the newest answers, whatever the offsets."""
    tail = [each for each in evidence if each.is_judged][-NEWEST[-1] :]
    wrong = sum(each.exactness is Exactness.MISMATCH for each in tail)
    if lower_bound(wrong, len(tail)) > max(MIN_MISMATCH_SHARE, settings.max_drift_share):
        yield _critical("A05", provider, f"{wrong} of the newest {len(tail)} counts disagree")


def prompt_counts_begin(provider: str, evidence: Sequence[Evidence], settings: Audit) -> Iterator[AuditFinding]:
    """A08, while a run goes on: prompts are billed with other counts, so another chat template is at work."""
    judged = [each for each in evidence if each.prompt_delta is not None]
    for size in NEWEST:
        tail = judged[-size:]
        wrong = sum(each.prompt_delta != 0 for each in tail)
        if lower_bound(wrong, len(tail)) > max(MIN_PROMPT_SHARE, settings.max_mismatch_share):
            offset, count = Counter(each.prompt_delta for each in tail if each.prompt_delta).most_common(1)[0]
            yield _critical(
                "A08",
                provider,
                f"{wrong} of the newest {len(tail)} prompts were billed with another number of ids, {count} of them "
                f"{offset:+d}: this provider renders another chat template",
            )
            return


def spaces_change(provider: str, evidence: Sequence[Evidence], settings: Audit) -> Iterator[AuditFinding]:
    """A09, while a run goes on: nearly all texts of a dataset begin to start, or end, with a space, or stop to."""
    del settings
    for dataset in sorted({each.dataset for each in evidence}):
        own = [each for each in evidence if each.dataset == dataset]
        for edge in ("start", "end"):
            edges = [
                (each.num_edges.get(edge, 0), each.num_spaced_edges.get(edge, 0))
                for each in own
                if each.num_edges.get(edge, 0)
            ]
            newest = edges[-MIN_EDGES:]
            earlier = edges[: -len(newest)][:NUM_FIRST_EDGES]  # the first ones: a change is soon among the later ones
            if len(earlier) < MIN_EDGES:
                continue
            before, now = _share(earlier), _share(newest)
            if min(before, now) <= 1 - SPACED_SHARE and max(before, now) >= SPACED_SHARE:
                yield _critical(
                    "A09",
                    provider,
                    f"{now:.0%} of the newest texts of dataset {dataset!r} {edge} with one space, {before:.0%} of "
                    "the first ones: the detokenizer changed",
                )


SHIFT_RULES: Mapping[str, ShiftRule] = {
    "A05": mismatches_begin,
    "A06": offset_begins,
    "A08": prompt_counts_begin,
    "A09": spaces_change,
}


def _share(edges: Sequence[tuple[int, int]]) -> float:
    return sum(spaced for _, spaced in edges) / sum(count for count, _ in edges)


def _critical(rule: str, provider: str, detail: str) -> AuditFinding:
    return AuditFinding(rule=rule, severity=Severity.CRITICAL, sample_id=None, detail=detail, provider=provider)
