"""The summary of a run: one JSON object, `summary.json`.

A figure that is not known yet is null. Money is text, so that no dollar is rounded on its way. Paths are relative to
the run directory.
"""

import json
from collections.abc import Mapping
from decimal import Decimal

from eagle3.artifacts import RunDirectory, Stage, commit_json
from eagle3.progress_log import active_seconds
from eagle3.records import JsonObject
from eagle3.report.reading import RunView, as_mapping, at, dollars, integer, number, read_run
from eagle3.report.status import status_of


def build_summary(run: RunDirectory) -> JsonObject:
    """Return the figures of a run, whole or partial.

    Raises:
        InputError: There is no such directory.
    """
    return summary_of(read_run(run))


def read_summary(run: RunDirectory) -> JsonObject:
    """Return what `summary.json` says; built anew when it is missing or damaged.

    Raises:
        InputError: There is no such directory.
    """
    try:
        return as_mapping(json.loads(run.summary_path.read_bytes())) or build_summary(run)
    except (OSError, ValueError):
        return build_summary(run)


def write_summary(run: RunDirectory) -> JsonObject:
    """Write `summary.json` into the run directory and return what it says.

    Raises:
        InputError: There is no such directory.
    """
    summary = build_summary(run)
    commit_json(run.summary_path, summary)
    return summary


def summary_of(view: RunView) -> JsonObject:
    """Return the figures of a run that was read already."""
    status = status_of(view)
    spend = status.spend
    answers, samples = view.stats(Stage.COMPLETIONS), view.stats(Stage.TOKEN_SAMPLES)
    counted = samples or answers
    answered = view.stages[Stage.COMPLETIONS].shards
    prompt_tokens, completion_tokens = integer(counted.get("prompt_tokens")), integer(counted.get("completion_tokens"))
    seconds = stage_seconds(view)
    trained, untrained = acceptance(view, "trained"), acceptance(view, "untrained")
    corpus = view.stages[Stage.CORPUS]
    audit = view.stats(Stage.AUDIT)
    return {
        "run": view.name,
        "recipe": status.recipe,
        "target": at(view.recipe, "target", "name"),
        "complete": status.is_complete,
        "samples": integer(counted.get("samples", sum(shard.num_samples for shard in answered) or None)),
        "failed": integer(answers.get("failed")),
        "dropped_prompts": sum(view.dropped_prompts.values()),
        "tokens": None if prompt_tokens is None or completion_tokens is None else prompt_tokens + completion_tokens,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "exactness": exactness_counts(view) or None,
        "audit_verdict": audit.get("verdict") or view.audit.get("verdict"),
        "audit": {key: integer(audit.get(key)) for key in ("kept", "dropped")},
        "planned_usd": {"expected": spend.planned_expected_usd, "worst": spend.planned_worst_usd},
        "budget_usd": spend.budget_usd,
        "spent_usd": spend.spent_usd,
        "held_usd": spend.held_usd,
        "corpus": {split: as_mapping(corpus.stats.get(split)) or None for split in ("train", "validation")},
        "corpus_digest": corpus.stats.get("corpus_digest"),
        "training_loss": training_loss(view),
        "acceptance_length": {"untrained": untrained, "trained": trained},
        "acceptance_length_untrained": untrained,
        "acceptance_length_trained": trained,
        "acceptance_by_position": view.stats(Stage.EVALUATION).get("acceptance_by_position"),
        "providers": provider_shares(view),
        "stages": {
            row.stage.value: {
                "state": row.state.value,
                "samples": row.samples,
                "tokens": row.tokens,
                "wall_s": seconds.get(row.stage),
            }
            for row in status.stages
        },
        "paths": {
            "summary": "summary.json",
            "report": "report.html",
            **{row.stage.name.lower(): row.stage.value for row in status.stages if view.stages[row.stage].is_complete},
        },
    }


def exactness_counts(view: RunView) -> Mapping[str, int]:
    """Return samples per exactness grade; empty before reconstruction."""
    found = view.stats(Stage.TOKEN_SAMPLES).get("exactness") or view.audit.get("exactness")
    return {grade: integer(count) or 0 for grade, count in as_mapping(found).items()}


def acceptance(view: RunView, which: str) -> float | None:
    """Return the acceptance length of the `trained` or the `untrained` draft, tokens per round."""
    key = f"acceptance_length_{which}"
    return number(view.stats(Stage.EVALUATION).get(key, view.evaluation.get(key)))


def training_loss(view: RunView) -> float | None:
    """Return the loss the training ended with: what the stage sealed, else the last one reported."""
    stats = view.stats(Stage.DRAFT)
    sealed = number(stats.get("final_loss"))
    if sealed is not None:
        return sealed
    for entry in reversed(view.events_of(Stage.DRAFT)):
        if "loss" in entry.event.values:
            return number(entry.event.values["loss"])
    return None


def provider_shares(view: RunView) -> Mapping[str, JsonObject]:
    """Return samples, tokens and dollars per provider with their shares of the whole (0 to 1)."""
    providers = as_mapping(view.stats(Stage.COMPLETIONS).get("by_provider"))
    samples = sum(integer(at(entry, "samples")) or 0 for entry in providers.values())
    cost = sum((dollars(at(entry, "cost_usd")) or Decimal(0) for entry in providers.values()), Decimal(0))
    shares: dict[str, JsonObject] = {}
    for name, entry in sorted(providers.items(), key=lambda item: -(integer(at(item[1], "samples")) or 0)):
        own_samples, own_cost = integer(at(entry, "samples")) or 0, dollars(at(entry, "cost_usd")) or Decimal(0)
        shares[name] = {
            "samples": own_samples,
            "completion_tokens": integer(at(entry, "completion_tokens")),
            "cost_usd": f"{own_cost:f}",
            "sample_share": round(own_samples / samples, 4) if samples else None,
            "cost_share": round(float(own_cost / cost), 4) if cost else None,
        }
    return shares


def stage_seconds(view: RunView) -> Mapping[Stage, float]:
    """Return the seconds worked on each stage, pauses left out; stages nobody timed are not in it.

    Attempts that ended write down what their stages took, progress also covers attempts that were killed: the longer
    of the two is closer to the truth.
    """
    seconds: dict[Stage, float] = {}
    for stage in Stage:
        own = view.events_of(stage)
        logged = active_seconds(own)[-1] if own else 0.0
        timed = sum(number(at(attempt, "wall_s", stage.command)) or 0.0 for attempt in view.attempts)
        if own or timed:
            seconds[stage] = round(max(logged, timed), 1)
    return seconds
