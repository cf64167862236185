"""Where a run stands: per stage and per dataset, what was spent, what is unfinished and why.

The files decide: manifests, references of committed shards, failed samples. Only while generation has sealed nothing
does the spend come from the progress log, and then it says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from eagle3.artifacts import RunDirectory, Stage, StageStatus
from eagle3.records import JsonObject
from eagle3.report.reading import STAGE_OF_EVENT, RunView, StageView, at, dollars, integer, number, read_run


class StageState(StrEnum):
    """How far a stage is."""

    NOT_STARTED = "not started"
    PARTIAL = "partial"
    PAUSED = "paused"
    FAILED = "failed"
    """It ran to its end and refused to seal."""
    COMPLETE = "complete"
    DRIFTED = "drifted"
    """Complete, but made from inputs that have changed since."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage."""

    stage: Stage
    state: StageState
    shards_done: int
    shards_expected: int | None
    """None when the stages before it do not tell."""
    samples: int
    tokens: int
    reason: str
    """Why it is not complete, in a sentence; empty when it is, or was never started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """One dataset of the recipe."""

    dataset: str
    prompts: int | None
    """Answers wanted, replicas included; None before the prompts are sealed."""
    dropped: int
    """Prompts dropped before any money was spent."""
    answered: int
    failed: int
    completion_tokens: int | None
    cost_usd: str | None
    """None until the completions seal or pause with figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """Money, in decimal US dollars as text."""

    budget_usd: str | None
    planned_expected_usd: str | None
    planned_worst_usd: str | None
    spent_usd: str | None
    held_usd: str | None
    """Reserved for requests whose fate is unknown or open."""
    source: str
    """`manifest`, `progress log` (last seen, the journal may hold more) or `none`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastProgress:
    """The last thing the run told."""

    time: float
    """Seconds since 1970, UTC."""
    stage: str
    label: str
    done: float
    total: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Where one run stands."""

    run: str
    recipe: str | None
    is_complete: bool
    stages: Sequence[StageRow]
    datasets: Sequence[DatasetRow]
    spend: Spend
    failures: Mapping[str, int]
    """Samples without an answer by reason, dropped prompts included."""
    journal_bytes: int
    last_progress: LastProgress | None

    @property
    def unfinished(self) -> Sequence[str]:
        """What stands in the way, a sentence each."""
        return [f"{row.stage.value}: {row.reason}" for row in self.stages if row.reason]

    @property
    def next_command(self) -> str | None:
        """What makes the first stage that is not complete; None when all are."""
        return next(
            (f"eagle3 {row.stage.command}" for row in self.stages if row.state is not StageState.COMPLETE), None
        )

    def to_json(self) -> JsonObject:
        """Return the status as a JSON object."""
        values = asdict(self)
        return {**values, "unfinished": list(self.unfinished), "next_command": self.next_command}


def run_status(run: RunDirectory) -> RunStatus:
    """Tell where a run stands; reads only, and copes with whatever state the files are in.

    Raises:
        InputError: There is no such directory.
    """
    return status_of(read_run(run))


def status_of(view: RunView) -> RunStatus:
    """Tell where a run stands that was read already."""
    rows = [_stage_row(view, stage) for stage in Stage]
    last = view.events[-1] if view.events else None
    return RunStatus(
        run=view.name,
        recipe=at(view.recipe, "name"),
        is_complete=all(row.state is StageState.COMPLETE for row in rows),
        stages=rows,
        datasets=_dataset_rows(view),
        spend=spend_of(view),
        failures={**view.failures, **{f"prompt: {reason}": count for reason, count in view.dropped_prompts.items()}},
        journal_bytes=view.journal_bytes,
        last_progress=None
        if last is None
        else LastProgress(
            time=last.time,
            stage=last.event.stage,
            label=last.event.label,
            done=last.event.done,
            total=last.event.total,
            unit=last.event.unit,
        ),
    )


def spend_of(view: RunView) -> Spend:
    """Return planned, spent and held dollars from the best source there is."""
    stats = view.stats(Stage.COMPLETIONS)
    spent, held, source = dollars(stats.get("spent_usd")), dollars(stats.get("held_usd")), "manifest"
    if spent is None:
        source = "none"
        for entry in reversed(view.generation_events):
            if "spent_usd" in entry.event.values:
                spent, held = dollars(entry.event.values["spent_usd"]), dollars(entry.event.values.get("held_usd"))
                source = "progress log"
                break
    return Spend(
        budget_usd=_money(at(view.recipe, "generation", "budget_usd")),
        planned_expected_usd=_money(at(stats, "planned_usd", "expected")),
        planned_worst_usd=_money(at(stats, "planned_usd", "worst")),
        spent_usd=_money(spent),
        held_usd=_money(held),
        source=source,
    )


def _money(value: object) -> str | None:
    amount = dollars(value)
    return None if amount is None else f"{amount:f}"


def _stage_row(view: RunView, stage: Stage) -> StageRow:
    found = view.stages[stage]
    shards = found.shards
    state, reason = _state_of(view, found)
    return StageRow(
        stage=stage,
        state=state,
        shards_done=len(shards),
        shards_expected=len(shards) if found.is_complete else _expected_shards(view, stage),
        samples=sum(shard.num_samples for shard in shards) if shards else integer(found.stats.get("samples")) or 0,
        tokens=sum(shard.num_tokens for shard in shards),
        reason=reason,
    )


def _expected_shards(view: RunView, stage: Stage) -> int | None:
    source = {
        Stage.COMPLETIONS: Stage.PROMPTS,
        Stage.TOKEN_SAMPLES: Stage.PROMPTS,
        Stage.HIDDEN_STATES: Stage.CORPUS,
    }.get(stage)
    if source is None or not view.stages[source].is_complete:
        return None
    shards = view.stages[source].shards
    return sum(shard.num_samples for shard in shards) if stage is Stage.HIDDEN_STATES else len(shards)


def _state_of(view: RunView, found: StageView) -> tuple[StageState, str]:
    if found.problem:
        return StageState.UNREADABLE, found.problem
    if found.manifest is not None and found.is_complete:
        drift = _changed_inputs(view, found.manifest.inputs)
        return (StageState.DRIFTED, drift) if drift else (StageState.COMPLETE, "")
    if found.manifest is not None and found.manifest.status is StageStatus.PAUSED:
        return StageState.PAUSED, _pause_reason(found)
    if found.stage is Stage.AUDIT and view.audit.get("verdict") == "failed":
        return StageState.FAILED, _audit_reason(view)
    if found.stage is Stage.EVALUATION and view.evaluation:
        length = number(view.evaluation.get("acceptance_length_trained"))
        return StageState.FAILED, f"it refused a draft with acceptance length {length}. Read 8-evaluation/report.json."
    pause = at(view.attempts[-1], "paused") if view.attempts else None
    is_next = all(view.stages[stage].is_complete for stage in Stage if stage < found.stage)
    if pause and is_next:
        return StageState.PAUSED, f"{' '.join(str(pause).split())}"
    return _unsealed_state(view, found)


def _unsealed_state(view: RunView, found: StageView) -> tuple[StageState, str]:
    expected = _expected_shards(view, found.stage)
    if found.shards:
        of_all = f" of {expected}" if expected is not None else ""
        left = f"; {found.other_refs} more files are from other settings" if found.other_refs else ""
        return StageState.PARTIAL, f"{len(found.shards)}{of_all} shards are done{left}. Run it again to go on."
    if found.stage is Stage.COMPLETIONS and view.journal_bytes:
        size = f"{view.journal_bytes:,} bytes"
        return (
            StageState.PARTIAL,
            f"the journal holds {size} of answers, no shard is sealed yet. Run it again to go on.",
        )
    if found.other_refs:
        return StageState.NOT_STARTED, f"{found.other_refs} files are left from other settings."
    if any(STAGE_OF_EVENT.get(entry.event.stage) is found.stage for entry in view.events):
        return StageState.PARTIAL, "it was started and sealed nothing. Run it again to go on."
    return StageState.NOT_STARTED, ""


def _changed_inputs(view: RunView, inputs: Mapping[str, str]) -> str:
    for name, digest in inputs.items():
        if name not in set(Stage):
            continue
        source = view.stages[Stage(name)]
        if source.problem:
            continue
        if source.manifest is None:
            return f"it was made from {name!r}, which is not there any more."
        if source.manifest.digest != digest:
            return (
                f"it was made from {name!r} with digest {digest[:12]}…, which now has "
                f"{source.manifest.digest[:12]}…. Run it again with '--redo'."
            )
    return ""


def _pause_reason(found: StageView) -> str:
    stats: Mapping[str, Any] = found.stats
    told = next((stats[key] for key in ("paused_because", "pause_reason", "reason") if stats.get(key)), None)
    done = integer(stats.get("samples"))
    so_far = f" after {done} samples" if done is not None else ""
    return f"paused{so_far}{f': {told}' if told else ''}. Run it again to go on."


def _audit_reason(view: RunView) -> str:
    critical = [
        f"{rule} ({count})"
        for rule, counts in (view.audit.get("counts") or {}).items()
        if (count := integer(at(counts, "critical")))
    ]
    rules = ", ".join(critical[:5]) or "see report.json"
    return f"the audit's verdict is failed: {rules}. Read 4-audit/report.html."


def _dataset_rows(view: RunView) -> Sequence[DatasetRow]:
    prompts = at(view.stats(Stage.PROMPTS), "datasets") or {}
    answers = at(view.stats(Stage.COMPLETIONS), "datasets") or {}
    declared = [str(at(entry, "name")) for entry in at(view.recipe, "prompts", "datasets") or ()]
    names = list(dict.fromkeys([*declared, *prompts, *answers]))
    shards = view.stages[Stage.COMPLETIONS].shards
    return [
        DatasetRow(
            dataset=name,
            prompts=integer(at(prompts, name, "samples") or at(prompts, name, "prompts")),
            dropped=integer(at(prompts, name, "dropped")) or 0,
            answered=integer(at(answers, name, "samples"))
            or sum(shard.num_samples for shard in shards if shard.path.startswith(f"{name}/")),
            failed=integer(at(answers, name, "failed")) or 0,
            completion_tokens=integer(at(answers, name, "completion_tokens")),
            cost_usd=_money(at(answers, name, "cost_usd")),
        )
        for name in names
    ]
