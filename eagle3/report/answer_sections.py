"""Report sections about the answers: their cost, length, providers and exactness, and what was lost on the way."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow.parquet as pq

from eagle3.artifacts import RunDirectory, Stage, verify_shard
from eagle3.errors import ArtifactError
from eagle3.progress_log import LoggedEvent, active_seconds
from eagle3.records import Exactness
from eagle3.report import svg
from eagle3.report.markup import charts, note, section, table
from eagle3.report.reading import RunView, as_mapping, integer, number
from eagle3.report.rendering import held_text, usd
from eagle3.report.status import RunStatus
from eagle3.report.summary import exactness_counts, provider_shares

_TRAFFIC = {
    "peak_in_flight": "most requests in flight",
    "rate_limited": "refusals by rate limit",
    "paid_twice": "answers paid twice",
    "unexplained_usd": "dollars the account lost without an answer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLengths:
    """Tokens of every sample, prompt and completion apart."""

    prompt: Sequence[int]
    completion: Sequence[int]
    problem: str
    """Why some are missing; empty when none are."""


def read_token_lengths(run: RunDirectory, view: RunView) -> TokenLengths:
    """Return the token counts of all reconstructed samples; damaged files are named and left out."""
    prompt: list[int] = []
    completion: list[int] = []
    problems: list[str] = []
    for shard in view.stages[Stage.TOKEN_SAMPLES].shards:
        if not shard.path.endswith(".parquet"):
            continue  # profiles and findings are sealed beside the samples
        try:
            path = verify_shard(run.stage_path(Stage.TOKEN_SAMPLES), shard)
        except ArtifactError as exc:
            problems.append(str(exc))
            continue
        columns = pq.read_table(path, columns=["num_prompt_tokens", "segments"])
        rows = zip(columns["num_prompt_tokens"].to_pylist(), columns["segments"].to_pylist(), strict=True)
        for num_prompt_tokens, segments in cast("Any", rows):
            prompt.append(num_prompt_tokens)
            completion.append(segments[-1]["stop"] - num_prompt_tokens if segments else 0)
    return TokenLengths(prompt=prompt, completion=completion, problem=" ".join(problems))


def spend_section(view: RunView, status: RunStatus) -> str:
    """Show dollars and requests in flight over the time worked."""
    events = view.generation_events
    spent, in_flight = _curve(events, "spent_usd"), _curve(events, "in_flight")
    money = [entry for entry in events if number(entry.event.values.get("spent_usd")) is not None]
    seconds = active_seconds(money)
    held = [
        (when, number(entry.event.values.get("held_usd")) or 0.0) for when, entry in zip(seconds, money, strict=True)
    ]
    stats = view.stats(Stage.COMPLETIONS)
    rows = [[text, stats[key]] for key, text in _TRAFFIC.items() if key in stats]
    facts = table(["traffic", "value"], rows, (1,))
    if not spent and not in_flight:
        sentence = f"No progress was logged; spent {usd(status.spend.spent_usd)}." if status.spend.spent_usd else ""
        return section("spend", "Spend and requests in flight", note(sentence) if sentence else "", facts)
    sentence = (
        f"Spent {usd(status.spend.spent_usd)} of {usd(status.spend.budget_usd)}; {held_text(status.spend)}; "
        f"at worst {usd(status.spend.planned_worst_usd)} was planned. Time without a running process is left out."
    )
    pictures = charts(
        svg.area_chart(
            "Spend over time",
            [svg.Series(name="spent", points=spent), svg.Series(name="held for open requests", points=held)],
            x_label="seconds of work",
            y_label="US dollars",
        ),
        svg.line_chart(
            "Requests in flight",
            [svg.Series(name="in flight", points=in_flight)],
            x_label="seconds of work",
            y_label="requests",
            from_zero=True,
        ),
    )
    return section("spend", "Spend and requests in flight", note(sentence), pictures, facts)


def _curve(events: Sequence[LoggedEvent], key: str) -> Sequence[tuple[float, float]]:
    """Return (seconds worked, value) of every event that carries `key`."""
    carrying = [entry for entry in events if number(entry.event.values.get(key)) is not None]
    values = [number(entry.event.values[key]) or 0.0 for entry in carrying]
    return list(zip(active_seconds(carrying), values, strict=True))


def lengths_section(lengths: TokenLengths) -> str:
    """Show how long prompts and completions are."""
    if not lengths.prompt and not lengths.problem:
        return section("lengths", "Token lengths")
    return section(
        "lengths",
        "Token lengths",
        note(lengths.problem) if lengths.problem else "",
        charts(
            svg.histogram("Prompt tokens", lengths.prompt, x_label="tokens"),
            svg.histogram("Completion tokens", lengths.completion, x_label="tokens", index=1),
        ),
    )


def providers_section(view: RunView) -> str:
    """Show who answered and what each was paid."""
    shares = provider_shares(view)
    if not shares:
        return section("providers", "Providers")
    rows = [
        [
            name,
            entry["samples"],
            f"{entry['sample_share'] or 0:.1%}",
            entry["completion_tokens"],
            usd(entry["cost_usd"]),
            f"{entry['cost_share'] or 0:.1%}",
        ]
        for name, entry in shares.items()
    ]
    heads = ["provider", "samples", "share", "completion tokens", "cost", "share of cost"]
    bars = {
        "samples": {name: float(entry["samples"]) for name, entry in shares.items()},
        "dollars": {name: number(entry["cost_usd"]) or 0.0 for name, entry in shares.items()},
    }
    picture = svg.share_bars("Who answered, and what it cost", bars)
    return section("providers", "Providers", charts(picture), table(heads, rows, range(1, 6)))


def exactness_section(view: RunView) -> str:
    """Show how surely the token ids are the model's own, and where counts disagree."""
    grades = exactness_counts(view)
    deltas = {
        name: {_delta_name(delta): float(integer(count) or 0) for delta, count in as_mapping(counts).items()}
        for name, counts in as_mapping(view.audit.get("delta_by_provider")).items()
    }
    if not grades and not deltas:
        return section("exactness", "Exactness of the token ids")
    order = [grade.value for grade in Exactness if grade.value in grades]
    names = [*order, *sorted(set(grades) - set(order))]
    total = sum(grades.values())
    rows = [[name, grades[name], f"{grades[name] / total:.1%}" if total else "-"] for name in names]
    picture = svg.share_bars("Rebuilt minus billed completion tokens, by provider", deltas) if deltas else ""
    bars = svg.share_bars("Grades, best first", {"samples": {name: float(grades[name]) for name in names}})
    return section(
        "exactness",
        "Exactness of the token ids",
        charts(bars, picture),
        table(["grade", "samples", "share"], rows, (1, 2)),
        _truth_table(view),
    )


def _truth_table(view: RunView) -> str:
    """Show how ids rebuilt from text compare with the server's own, where it gave them."""
    truth = {
        name: integer(count) or 0 for name, count in as_mapping(view.stats(Stage.TOKEN_SAMPLES).get("truth")).items()
    }
    total = sum(truth.values())
    if not total:
        return ""
    rows = [[name.replace("_", " "), count, f"{count / total:.1%}"] for name, count in truth.items()]
    return table(["rebuilt from text, beside native ids", "samples", "share"], rows, (1, 2))


def _delta_name(delta: str) -> str:
    size = integer(number(delta))
    return f"{size:+d}" if size else ("0" if size == 0 else delta)


def left_out_section(view: RunView) -> str:
    """Show every sample that is not trained on, by reason, and what the audit found."""
    dropped = Counter(str(rule) for rule in as_mapping(view.audit.get("dropped")).values())
    left_out = as_mapping(view.stats(Stage.CORPUS).get("left_out"))
    rows: list[list[object]] = [
        *(["prompt not asked", reason, count] for reason, count in view.dropped_prompts.items()),
        *(["no answer", reason, count] for reason, count in view.failures.items()),
        *(["dropped by the audit", rule, count] for rule, count in sorted(dropped.items())),
        *(["left out of the corpus", reason, count] for reason, count in left_out.items()),
    ]
    done = view.stages[Stage.COMPLETIONS].is_complete
    empty = note("Nothing was dropped and nothing failed.") if done and not rows else ""
    findings = [
        [rule, severity, count]
        for rule, counts in as_mapping(view.audit.get("counts")).items()
        for severity, count in as_mapping(counts).items()
        if count
    ]
    found = table(["audit rule", "severity", "findings"], findings, (2,))
    return section(
        "left-out",
        "Dropped and failed samples",
        table(["where", "reason", "samples"], rows, (2,)),
        empty,
        found,
    )
