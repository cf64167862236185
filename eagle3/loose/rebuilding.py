"""Loose reply files to token ids: the road from completion to sample for answers that no run of ours asked for.

`eagle3.loose.reading` reads the lines. Here each line gets its grammar (by its model, or by a map), each provider and
model its profile, each answer its ids, grade and findings, those of the audit's sample rules included. Nothing is
written but the two files that were asked for.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from eagle3.audit.provider_rules import Evidence, audit_provider, evidence_of
from eagle3.audit.sample_rules import audit_sample
from eagle3.audit.subject import Subject, TokenRules
from eagle3.errors import InputError, TokenError
from eagle3.formats import FILE_SAMPLES, write_rows
from eagle3.loose.families import Family, GrammarChoice
from eagle3.loose.reading import ODDITIES, LooseReply, read_loose_replies, storable
from eagle3.recipe import Audit
from eagle3.records import AuditFinding, Completion, Exactness, JsonObject, Severity, TokenSample
from eagle3.tokens.comparison import fit_providers
from eagle3.tokens.profiles import AXES, ProviderProfile, fit_profile, habits_of
from eagle3.tokens.reconstruct import reconstruct, unrebuilt

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)

DEFAULT_MIN_SAMPLES = 20
"""Discriminating answers that identify a habit, as in recipes."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A line with the family and mode it is read by."""

    reply: LooseReply
    completion: Completion
    family: Family
    mode: str


@dataclass
class _Row:
    """What became of one line."""

    reply: LooseReply
    grammar: str
    mode: str
    sample: TokenSample | None = None
    evidence: Evidence | None = None
    findings: list[AuditFinding] = field(default_factory=list[AuditFinding])

    @property
    def exactness(self) -> Exactness:
        return Exactness.MISMATCH if self.sample is None else self.sample.exactness


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """What became of a file."""

    rows: Sequence[Mapping[str, Any]]
    """One per line that is not blank, in order; columns of `FILE_SAMPLES`."""
    report: JsonObject
    """Totals, and per provider: samples, profile, deltas, findings by rule."""


def reconstruct_file(
    source: Path,
    output: Path,
    *,
    choice: GrammarChoice,
    mode: str | None = None,
    report: Path | None = None,
    min_samples: int = DEFAULT_MIN_SAMPLES,
) -> JsonObject:
    """Rebuild the ids of every reply in a file.

    Args:
        source: JSON Lines; see `eagle3.loose.reading`.
        output: Parquet file to write, schema `FILE_SAMPLES`.
        choice: Which grammar each model's replies are read by.
        mode: Mode of all replies; None decides by request and replies.
        report: JSON file to write the report to.
        min_samples: Discriminating answers needed to identify a habit.

    Returns:
        The report.

    Raises:
        InputError: The file cannot be read, or a result cannot be written.
        TokenError: The default grammar and the tokenizer do not fit.
    """
    choice.default_family()
    replies = read_loose_replies(source)
    result = rebuild_replies(replies, choice, mode=mode, min_samples=min_samples)
    try:
        for path in (output, report):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(output, result.rows, FILE_SAMPLES)
        if report is not None:
            report.write_text(json.dumps(result.report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as exc:
        raise InputError(
            f"{exc.filename or str(output)!r} cannot be written: {exc.strerror}. Choose another place."
        ) from exc
    return result.report


def rebuild_replies(
    replies: Sequence[LooseReply], choice: GrammarChoice, *, mode: str | None = None, min_samples: int
) -> FileResult:
    """Rebuild replies that were read; files play no part.

    Args:
        replies: As read, in order.
        choice: Which grammar each model's replies are read by.
        mode: Mode of all replies; None decides by request and replies.
        min_samples: Discriminating answers needed to identify a habit.
    """
    rows: dict[int, _Row] = {}
    placed: list[_Placed] = []
    for reply in replies:
        name = choice.name_for(reply.model, reply.reply_model)
        row = rows[reply.line] = _Row(reply, name, "", findings=list(reply.findings))
        if reply.completion is None:
            continue
        if _names_differ(choice, reply):
            detail = f"asked for {reply.model!r}, answered by {reply.reply_model!r}"
            row.findings.append(_finding(reply, "other-model", Severity.ERROR, detail))
        try:
            family = choice.family(name)
            if mode is not None:
                family.grammar.mode(mode)
        except TokenError as exc:
            row.findings.append(_finding(reply, "no-family", Severity.ERROR, str(exc)))
            continue
        row.grammar = family.grammar.name
        placed.append(_Placed(reply, reply.completion, family, mode or _mode_of(reply, family)))
    if mode is None:
        placed = _settle_modes(placed, min_samples)
    profiles: dict[tuple[str, str, str, str], ProviderProfile] = {}
    for (name, mode_name), members in _grouped(placed, lambda item: (item.family.grammar.name, item.mode)).items():
        family = members[0].family
        groups = {
            key: [item.completion for item in group]
            for key, group in _grouped(members, lambda item: (item.reply.provider, item.reply.model)).items()
        }
        fitted = fit_providers(groups, family.grammar, family.tokenizer, mode_name, min_samples=min_samples)
        profiles.update({(*key, name, mode_name): profile for key, profile in fitted.items()})
    for item in placed:
        key = (item.reply.provider, item.reply.model, item.family.grammar.name, item.mode)
        _rebuild(item, profiles[key], rows[item.reply.line])
    ordered = [rows[reply.line] for reply in replies]
    # What a group as a whole shows comes before the rows are written: some of it is about single lines.
    report = _report(ordered, profiles)
    return FileResult(rows=[_to_row(row) for row in ordered], report=report)


def _names_differ(choice: GrammarChoice, reply: LooseReply) -> bool:
    if reply.reply_model is None:
        return False
    asked, answered = choice.known_name(reply.model), choice.known_name(reply.reply_model)
    return asked is not None and answered is not None and asked != answered


def _mode_of(reply: LooseReply, family: Family) -> str:
    """Return the mode that a request asked for; one with reasoning, when there is one, if it says nothing."""
    modes = family.grammar.modes
    wants_thinking = reply.wants_thinking is not False
    fitting = (name for name, mode in modes.items() if (mode.reasoning is not None) == wants_thinking)
    return next(fitting, next(iter(modes)))


def _settle_modes(placed: Sequence[_Placed], min_samples: int) -> list[_Placed]:
    """Decide about requests that do not say whether the model was to think.

    Only where no reply of a provider and model holds any reasoning is there a doubt; the mode that explains
    more of what was billed is taken, that with reasoning among equals.
    """
    settled = list(placed)
    for group in _grouped(
        placed, lambda item: (item.reply.provider, item.reply.model, item.family.grammar.name)
    ).values():
        family = group[0].family
        first = group[0].mode
        plain = [name for name, mode in family.grammar.modes.items() if mode.reasoning is None]
        is_told = any(item.reply.wants_thinking is not None for item in group)
        close = family.grammar.modes[first].close
        if is_told or close is None or not plain or any(_holds_reasoning(item, close) for item in group):
            continue
        completions = [item.completion for item in group]
        ranked = sorted((first, plain[0]), key=lambda name: _misfit(completions, family, name, min_samples))
        chosen = {item.reply.line for item in group}
        settled = [replace(item, mode=ranked[0]) if item.reply.line in chosen else item for item in settled]
    return settled


def _misfit(completions: Sequence[Completion], family: Family, mode: str, min_samples: int) -> tuple[int, int]:
    """Return how badly a mode explains what was billed: counts it misses, then habits it has to assume."""
    profile = fit_profile(completions, family.grammar, family.tokenizer, mode, min_samples=min_samples)
    usual = habits_of(family.grammar, mode)[0]
    assumed = sum(getattr(profile.habits, axis) != getattr(usual, axis) for axis in AXES)
    return len(completions) - profile.num_exact, assumed


def _holds_reasoning(item: _Placed, close: str) -> bool:
    literal = item.family.grammar.control[close].text
    return bool(item.completion.reasoning) or literal in (item.completion.content or "")


def _rebuild(item: _Placed, profile: ProviderProfile, row: _Row) -> None:
    family, reply = item.family, item.reply
    row.mode = item.mode
    prompt_ids: list[int] = []
    if reply.prompt.messages:
        try:
            prompt_ids = family.renderer(item.mode).render_ids(reply.prompt.messages, reply.prompt.tools)
        except (TokenError, *ODDITIES) as exc:
            row.findings.append(_finding(reply, "prompt-not-rendered", Severity.WARNING, str(exc)))
    else:
        row.findings.append(_finding(reply, "no-request", Severity.WARNING, "the line holds no messages to render"))
    try:
        result = reconstruct(
            item.completion,
            prompt_ids,
            family.grammar,
            family.tokenizer,
            profile,
            mode=item.mode,
            tools_declared=bool(reply.prompt.tools),
        )
    except TokenError as exc:
        result = unrebuilt(item.completion, prompt_ids, str(exc))
    row.sample = result.sample
    row.findings.extend(result.findings)
    rules = TokenRules(family.grammar, family.tokenizer, item.mode)
    subject = Subject(prompt=reply.prompt, completion=item.completion, sample=result.sample, rules=rules)
    # Without a prompt, its count says nothing.
    row.findings.extend(finding for finding in audit_sample(subject) if prompt_ids or finding.rule != "A08")
    evidence = evidence_of(subject)
    row.evidence = evidence if prompt_ids else replace(evidence, prompt_delta=None)


def _to_row(row: _Row) -> dict[str, Any]:
    reply, sample, completion = row.reply, row.sample, row.reply.completion
    usage = completion.usage if completion is not None else None
    return {
        "line": reply.line,
        "provider": reply.provider,
        "model": reply.model,
        "grammar": row.grammar,
        "mode": row.mode,
        "finish_reason": completion.finish_reason if completion is not None else "",
        "input_ids": list(sample.input_ids) if sample is not None else [],
        "num_prompt_tokens": sample.num_prompt_tokens if sample is not None else 0,
        "segments": [
            {"kind": segment.kind.value, "start": segment.start, "stop": segment.stop}
            for segment in (sample.segments if sample is not None else ())
        ],
        "billed_prompt_tokens": usage.prompt_tokens or None if usage is not None else None,
        "billed_completion_tokens": usage.completion_tokens or None if usage is not None else None,
        "delta": sample.delta if sample is not None else None,
        "exactness": row.exactness.value,
        "findings": [
            {"rule": finding.rule, "severity": finding.severity.value, "detail": storable(finding.detail)}
            for finding in row.findings
        ],
    }


def _report(rows: Sequence[_Row], profiles: Mapping[tuple[str, str, str, str], ProviderProfile]) -> JsonObject:
    providers: JsonObject = {}
    for provider, members in sorted(_grouped(rows, lambda row: row.reply.provider).items()):
        models: list[JsonObject] = []
        for (model, grammar, mode), group in _grouped(
            members, lambda row: (row.reply.model, row.grammar, row.mode)
        ).items():
            profile = profiles.get((provider, model, grammar, mode))
            shown = profile.to_json() if profile is not None else None
            judged = _judge_group(provider, group, profile)
            models.append(
                {
                    "model": model,
                    "grammar": grammar,
                    "mode": mode,
                    **_counts(group),
                    "profile": shown,
                    "group_findings": judged,
                }
            )
        models.sort(key=lambda entry: -int(entry["samples"]))
        # Programs that look for one profile find that of most samples; all of them stand under `models`.
        providers[provider] = {
            **_counts(members),
            "profile": models[0]["profile"],
            "group_findings": [finding for entry in models for finding in entry["group_findings"]],
            "models": models,
        }
    return {"lines": len(rows), **_counts(rows), "providers": providers}


def _judge_group(provider: str, group: Sequence[_Row], profile: ProviderProfile | None) -> list[JsonObject]:
    """Return what the answers of one group show together; what is about one line goes to its row."""
    rows = {row.evidence.sample_id: row for row in group if row.evidence is not None}
    evidence = [row.evidence for row in rows.values() if row.evidence is not None]
    about_all: list[JsonObject] = []
    for finding in audit_provider(provider, evidence, [profile] if profile is not None else [], Audit()):
        if finding.sample_id is not None:
            rows[finding.sample_id].findings.append(finding)
        else:
            about_all.append({"rule": finding.rule, "severity": finding.severity.value, "detail": finding.detail})
    return about_all


def _counts(rows: Sequence[_Row]) -> JsonObject:
    deltas = Counter(row.sample.delta for row in rows if row.sample is not None and row.sample.delta is not None)
    return {
        "samples": sum(row.sample is not None for row in rows),
        "bad_lines": sum(row.sample is None for row in rows),
        "exactness": dict(sorted(Counter(row.exactness.value for row in rows).items())),
        "delta": {str(delta): count for delta, count in sorted(deltas.items())},
        "findings": dict(sorted(Counter(finding.rule for row in rows for finding in row.findings).items())),
    }


def _finding(reply: LooseReply, rule: str, severity: Severity, detail: str) -> AuditFinding:
    return AuditFinding(
        rule=rule, severity=severity, sample_id=reply.prompt.sample_id, detail=detail, provider=reply.provider
    )


def _grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    groups: defaultdict[_Key, list[_Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)
