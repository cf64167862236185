"""Rules about all samples of one provider, or of the run: what no single sample can show.

**Drift against habit.** A model that samples an unusual spelling of a word produces more or fewer ids than its text
encodes to. Such *drift* hits a few samples of every kind, with small offsets of either sign; each is dropped by A05 and
nothing else follows. A *habit* of the provider that the profile does not know (an end token not billed, another
template, rewritten tool arguments) hits every sample of a kind with the same offset. So:

- A06 is critical when one non-zero offset covers at least half of the samples of a kind, and more than two;
- A05 is critical when the share of mismatches is surely above `audit.max_drift_share` whatever their offsets, where
  "surely" is the lower end of a 98 % confidence interval: three of ten are no proof of more than a tenth, three of
  three are;
- both look only at providers with more than two mismatches and a share above `audit.max_mismatch_share`; the rest is a
  warning.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from eagle3.audit.subject import FINISHED, Subject
from eagle3.recipe import Audit, Provider
from eagle3.records import IMPORTED_PROVIDER, AuditFinding, Exactness, SegmentKind, Severity
from eagle3.tokens.profiles import ProviderProfile

EVERY_KIND = "answers"
MIN_SAMPLES = 3
"""Two odd samples are chance; three are looked at."""
CONSTANT_SHARE = 0.5
"""Share of a kind that one offset must cover to be a habit."""
SPACED_SHARE = 0.9
MIN_EDGES = 5
CONFIDENCE_Z = 2.326
"""One-sided 99 %, that is the lower end of the two-sided 98 % interval."""
MAX_MODELS_SHOWN = 5
_NO_NAME = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What provider rules need of one sample; small enough to keep for a whole run."""

    sample_id: str
    provider: str
    model: str
    quantization: str | None
    exactness: Exactness
    delta: int | None
    """Rebuilt minus billed completion ids; None for ids given by the server and for unbilled answers."""
    prompt_delta: int | None
    """Rendered minus billed prompt ids; None when none were billed."""
    kinds: frozenset[str]
    """Kinds of answer that a habit may single out."""
    num_edges: Mapping[str, int]
    """Texts of the reply by edge: `start` counts reasoning and content, `end` those that the model ended itself."""
    num_spaced_edges: Mapping[str, int]
    """Those that start, or end, with exactly one space."""
    reasoning_offset: int | None = None
    """Reported reasoning tokens minus ids of the reasoning; None when not reported."""
    dataset: str = ""

    @property
    def is_judged(self) -> bool:
        """Whether ids were rebuilt from text and held against a bill, or could not be rebuilt at all."""
        return self.delta is not None or self.exactness is Exactness.MISMATCH


def evidence_of(subject: Subject) -> Evidence:
    """Reduce a sample to what provider rules need."""
    completion, sample = subject.completion, subject.sample
    starts = [text for text in (completion.reasoning, completion.content) if text]
    ends = starts if completion.finish_reason in FINISHED else starts[:-1]
    kinds = {
        EVERY_KIND,
        f"answers ended by {completion.finish_reason!r}",
        "answers with tool calls" if completion.tool_calls else "answers without tool calls",
        "answers with reasoning" if completion.reasoning else "answers without reasoning",
    }
    reasoning_ids = sum(each.stop - each.start for each in sample.segments if each.kind is SegmentKind.REASONING)
    reported = completion.usage.reasoning_tokens
    return Evidence(
        sample_id=sample.sample_id,
        provider=sample.provider,
        model=sample.model,
        quantization=completion.quantization,
        exactness=sample.exactness,
        delta=None if subject.is_given else sample.delta,
        prompt_delta=(
            sample.num_prompt_tokens - completion.usage.prompt_tokens if completion.usage.prompt_tokens > 0 else None
        ),
        kinds=frozenset(kinds),
        num_edges={"start": len(starts), "end": len(ends)},
        num_spaced_edges={
            "start": sum(text.startswith(" ") and not text.startswith("  ") for text in starts),
            "end": sum(text.endswith(" ") and not text.endswith("  ") for text in ends),
        },
        reasoning_offset=None if reported is None or not reasoning_ids else reported - reasoning_ids,
        dataset=sample.dataset,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderView:
    """All samples of one provider."""

    provider: str
    evidence: Sequence[Evidence]
    profiles: Sequence[ProviderProfile]
    settings: Audit

    def finding(self, rule: str, severity: Severity, detail: str) -> AuditFinding:
        """Return a finding about this provider."""
        return AuditFinding(rule=rule, severity=severity, sample_id=None, detail=detail, provider=self.provider)


ProviderRule: TypeAlias = Callable[[ProviderView], Iterator[AuditFinding]]


def lower_bound(hits: int, total: int) -> float:
    """Return the lower end of Wilson's confidence interval for a share."""
    if total == 0:
        return 0.0
    share, z2 = hits / total, CONFIDENCE_Z**2
    spread = CONFIDENCE_Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return (share + z2 / (2 * total) - spread) / (1 + z2 / total)


def mismatch_share(view: ProviderView) -> Iterator[AuditFinding]:
    """A05, of a provider: how many counts disagree."""
    judged = [each for each in view.evidence if each.is_judged]
    wrong = [each for each in judged if each.exactness is Exactness.MISMATCH]
    if not _is_notable(len(wrong), len(judged), view.settings):
        return
    limit = view.settings.max_drift_share
    counts = f"{len(wrong)} of {len(judged)} counts disagree ({len(wrong) / len(judged):.1%})"
    if lower_bound(len(wrong), len(judged)) > limit:
        yield view.finding("A05", Severity.CRITICAL, f"{counts}, surely more than audit.max_drift_share = {limit:.1%}")
    else:
        yield view.finding("A05", Severity.WARNING, f"{counts}: within audit.max_drift_share, dropped one by one")


def constant_offset(view: ProviderView) -> Iterator[AuditFinding]:
    """A06: no offset that most answers of a kind share."""
    judged = [each for each in view.evidence if each.is_judged]
    wrong = [each for each in judged if each.exactness is Exactness.MISMATCH and each.delta is not None]
    if not _is_notable(len(wrong), len(judged), view.settings):
        return
    kinds = sorted({kind for each in wrong for kind in each.kinds}, key=lambda kind: (kind != EVERY_KIND, kind))
    for kind in kinds:
        members = sum(kind in each.kinds for each in judged)
        offset, count = Counter(each.delta for each in wrong if kind in each.kinds).most_common(1)[0]
        if count >= MIN_SAMPLES and count >= CONSTANT_SHARE * members:
            detail = (
                f"{count} of {members} {kind} have {offset:+d} ids against the bill: a habit that the profile does not "
                "know. Extend the grammar's variants, or leave this provider out."
            )
            yield view.finding("A06", Severity.CRITICAL, detail)
            return


def profile_is_known(view: ProviderView) -> Iterator[AuditFinding]:
    """A07: every habit of the provider was learned from enough answers; the rest is masked from the loss."""
    for profile in view.profiles:
        unknown = sorted(axis for axis, fit in profile.axes.items() if not fit.identified)
        if unknown:
            detail = f"not identified from {profile.num_samples} answers of {profile.model!r}: {', '.join(unknown)}"
            yield view.finding("A07", Severity.WARNING, detail)


def prompt_share(view: ProviderView) -> Iterator[AuditFinding]:
    """A08, of a provider: prompts have no drift, so more than chance means another chat template."""
    judged = [each for each in view.evidence if each.prompt_delta is not None]
    wrong = [each for each in judged if each.prompt_delta != 0]
    if not _is_notable(len(wrong), len(judged), view.settings):
        return
    offset, count = Counter(each.prompt_delta for each in wrong).most_common(1)[0]
    detail = (
        f"{len(wrong)} of {len(judged)} prompts were billed with another number of ids, {count} of them {offset:+d}: "
        "this provider renders another chat template. Check target.template_options, or leave it out."
    )
    yield view.finding("A08", Severity.CRITICAL, detail)


def spaced_edges(view: ProviderView) -> Iterator[AuditFinding]:
    """A09: spaces at nearly all starts, or ends, are the detokenizer's until the profile has decided.

    Samples whose undecided ids are masked stay; those where the space went into ids that count are dropped.
    """
    undecided: set[str] = set()
    for edge, axis in (("start", "head_space"), ("end", "tail_space")):
        texts = sum(each.num_edges[edge] for each in view.evidence)
        spaced = sum(each.num_spaced_edges[edge] for each in view.evidence)
        if texts < MIN_EDGES or spaced <= SPACED_SHARE * texts:
            continue
        if view.profiles and all(profile.axes[axis].identified for profile in view.profiles):
            continue
        detail = f"{spaced} of {texts} texts {edge} with one space, and the profile has not decided whose it is"
        yield view.finding("A09", Severity.WARNING, detail)
        undecided |= {each.sample_id for each in view.evidence if each.num_spaced_edges[edge]}
    for each in view.evidence:
        if each.sample_id in undecided and each.exactness in (Exactness.COUNT_VERIFIED, Exactness.UNVERIFIED):
            yield AuditFinding(
                rule="A09",
                severity=Severity.ERROR,
                sample_id=each.sample_id,
                detail="a space of unknown origin at the edge of a text is not masked",
                provider=view.provider,
            )


def reasoning_count(view: ProviderView) -> Iterator[AuditFinding]:
    """A20: what the reported reasoning tokens count, for people."""
    offsets = Counter(each.reasoning_offset for each in view.evidence if each.reasoning_offset is not None)
    if offsets:
        shown = ", ".join(f"{offset:+d} ({count}x)" for offset, count in offsets.most_common(3))
        yield view.finding("A20", Severity.INFO, f"reported reasoning tokens minus ids of the reasoning: {shown}")


PROVIDER_RULES: Mapping[str, ProviderRule] = {
    "A05": mismatch_share,
    "A06": constant_offset,
    "A07": profile_is_known,
    "A08": prompt_share,
    "A09": spaced_edges,
    "A20": reasoning_count,
}


def audit_providers(
    evidence: Iterable[Evidence], profiles: Sequence[ProviderProfile], settings: Audit, provider: Provider
) -> list[AuditFinding]:
    """Return what all rules about providers find, and rule A19 about the run."""
    by_provider: defaultdict[str, list[Evidence]] = defaultdict(list)
    for each in evidence:
        by_provider[each.provider].append(each)
    findings: list[AuditFinding] = []
    for name in sorted(by_provider):
        own = [profile for profile in profiles if profile.provider == name]
        findings += audit_provider(name, by_provider[name], own, settings)
    findings += origin(by_provider, provider)
    return findings


def audit_provider(
    name: str, evidence: Sequence[Evidence], profiles: Sequence[ProviderProfile], settings: Audit
) -> list[AuditFinding]:
    """Return what all rules find about one provider, wherever its answers come from."""
    view = ProviderView(provider=name, evidence=evidence, profiles=profiles, settings=settings)
    return [finding for rule in PROVIDER_RULES.values() for finding in rule(view)]


def origin(by_provider: Mapping[str, Sequence[Evidence]], provider: Provider) -> Iterator[AuditFinding]:
    """A19: answers come from allowed providers and precisions, and from one model under one name.

    Imported answers are left out: who brought them answers for their origin.
    """
    by_provider = {name: evidence for name, evidence in by_provider.items() if name != IMPORTED_PROVIDER}
    everything = [each for evidence in by_provider.values() for each in evidence]
    models = Counter(each.model for each in everything)
    if len(models) > 1:
        shown = ", ".join(f"{model!r} ({count}x)" for model, count in models.most_common(MAX_MODELS_SHOWN))
        yield _of_run(f"replies name {len(models)} models: {shown}")
    if provider.kind == "openai" or provider.kind == "sglang":  # noqa: PLR1714 - pyright narrows by it
        return  # local servers name models by paths of their own, and offer no choice of providers
    asked = provider.model.partition(":")[0]
    strangers = sorted(model for model in models if not model.startswith(asked))
    if strangers:
        yield _of_run(f"asked for {provider.model!r}, replies name {strangers[:MAX_MODELS_SHOWN]}")
    routing = provider.routing
    only = {_bare(name.partition("/")[0]) for name in routing.only}
    ignored = {_bare(name) for name in routing.ignore if "/" not in name}
    for name, evidence in sorted(by_provider.items()):
        if (only and _bare(name) not in only) or _bare(name) in ignored:
            yield _of_run(f"{len(evidence)} answers from a provider that routing does not allow", name)
        precisions = Counter(each.quantization for each in evidence if each.quantization is not None)
        for precision, count in sorted(precisions.items()):
            if precision not in routing.quantizations:
                yield _of_run(f"{count} answers at precision {precision!r}, which routing does not allow", name)


def _of_run(detail: str, provider: str | None = None) -> AuditFinding:
    return AuditFinding(rule="A19", severity=Severity.CRITICAL, sample_id=None, detail=detail, provider=provider)


def _bare(name: str) -> str:
    """Return a provider name or slug without case and punctuation: replies name providers, recipes name slugs."""
    return _NO_NAME.sub("", name.lower())


def _is_notable(wrong: int, total: int, settings: Audit) -> bool:
    return wrong >= MIN_SAMPLES and wrong > settings.max_mismatch_share * total
