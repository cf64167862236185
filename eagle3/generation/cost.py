"""What the answers of a run will cost, before a cent is spent: per dataset, expected and worst."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from eagle3.artifacts import RunDirectory, Stage, commit_json
from eagle3.generation.history import replay
from eagle3.generation.selection import select_endpoints
from eagle3.generation.shards import PLAN_NAME, STATE_NAME, prompt_shards, read_prompts
from eagle3.providers.base import Endpoint, money_up
from eagle3.providers.opening import open_provider
from eagle3.providers.policy import Selection
from eagle3.recipe import Dataset, Recipe
from eagle3.records import JsonObject

MIN_KNOWN_ANSWERS = 20
"""Fewer finished answers say little about lengths."""
UNKNOWN_LENGTH_SHARE = 0.5
"""Expected length as a share of `max_tokens` while no answers are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetCost:
    """The plan of one dataset. Money and tokens concern the samples that are still to be asked."""

    dataset: str
    num_samples: int
    num_answered: int
    """Finished in this run already; they are never asked again."""
    prompt_tokens: int
    """As counted by the prompts stage, else an upper bound."""
    max_tokens: int
    expected_tokens_per_answer: float
    is_length_known: bool
    """True when the expected length comes from finished answers, False when it is a guess."""
    expected_usd: Decimal
    worst_usd: Decimal
    """Every answer at `max_tokens` from the dearest endpoint, every prompt at the bound that is reserved for it."""
    reservation_usd: Decimal
    """The most the dearest open request can cost: what the guard sets aside for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPlan:
    """The plan of a run."""

    datasets: Sequence[DatasetCost]
    expected_usd: Decimal
    worst_usd: Decimal
    spent_usd: Decimal
    """By this run so far."""
    held_usd: Decimal
    budget_usd: Decimal
    requests_at_once: int
    """How many requests the budget carries at the same time, at most `generation.in_flight`."""
    watched_at_once: int | None
    """How many the audit while generating lets go out at the same time; None when nothing is watched."""
    endpoints: Sequence[Endpoint]
    """Those that may answer."""
    refused: Sequence[tuple[Endpoint, str]]
    """Those that may not, with the reason."""
    warnings: Sequence[str]

    def to_json(self) -> JsonObject:
        """Return the plan as JSON values, money as text."""
        return cast("JsonObject", _json_of(asdict(self)))


def estimate_cost(recipe: Recipe, run: RunDirectory, target: Path) -> CostPlan:
    """Return what the run will cost. Lists endpoints over the network, asks for no completion, spends nothing.

    Args:
        recipe: Sections prompts and generation.
        run: Its prompts must be sealed.
        target: Prepared Hugging Face directory, for a look-alike that has to know the tokenizer.

    Raises:
        StageMissingError: The prompts were not sealed.
        RunRejectedError: No endpoint may answer.
    """
    endpoints = asyncio.run(_list_endpoints(recipe, run, target))
    return plan_cost(recipe, run, endpoints)


def plan_cost(recipe: Recipe, run: RunDirectory, endpoints: Sequence[Endpoint]) -> CostPlan:
    """Return what the run will cost at the given endpoints; reads prompts and journals, nothing else.

    Raises:
        StageMissingError: The prompts were not sealed.
        RunRejectedError: No endpoint may answer.
    """
    generation = recipe.generation
    names = [dataset.name for dataset in recipe.prompts.datasets]
    history, ledger = replay(run.stage_path(Stage.COMPLETIONS), names, generation.budget_usd)
    shards = prompt_shards(run.sealed(Stage.PROMPTS))
    costs: list[DatasetCost] = []
    chosen: dict[str, Endpoint] = {}
    refused: dict[str, tuple[Endpoint, str]] = {}
    for dataset in recipe.prompts.datasets:
        selection = select_endpoints(recipe, endpoints, max_tokens=dataset.sampling.max_tokens)
        chosen.update({endpoint.tag: endpoint for endpoint in selection.eligible})
        refused.update({entry[0].tag: entry for entry in selection.refused})
        open_bounds: list[int] = []
        num_samples = counted_tokens = 0
        for shard in shards:
            if Path(shard.path).parent.name != dataset.name:
                continue
            prompts, bounds = read_prompts(run, shard)
            num_samples += len(prompts)
            counted_tokens += int(shard.stats.get("prompt_tokens", sum(bounds)))
            open_bounds += [
                bound
                for prompt, bound in zip(prompts, bounds, strict=True)
                if not history.sample(prompt.sample_id).is_final
            ]
        tally = history.tally(dataset.name)
        known = tally.completion_tokens / tally.samples if tally.samples >= MIN_KNOWN_ANSWERS else None
        mean_prompt = counted_tokens / num_samples if num_samples else 0.0
        costs.append(_cost_of(dataset, selection, open_bounds, mean_prompt, num_samples, tally.samples, known))
    dearest_usd = max((cost.reservation_usd for cost in costs), default=Decimal(0))
    available_usd = max(Decimal(0), ledger.available_usd)
    affordable = int(available_usd / dearest_usd) if dearest_usd else generation.in_flight
    audit = recipe.audit
    is_watched = audit.while_generating and audit.stop_on_critical and bool(dearest_usd)
    plan = CostPlan(
        datasets=tuple(costs),
        expected_usd=sum((cost.expected_usd for cost in costs), Decimal(0)),
        worst_usd=sum((cost.worst_usd for cost in costs), Decimal(0)),
        spent_usd=ledger.spent_usd,
        held_usd=ledger.held_usd,
        budget_usd=generation.budget_usd,
        requests_at_once=min(affordable, generation.in_flight),
        watched_at_once=max(1, int(audit.max_at_risk_usd / dearest_usd)) if is_watched else None,
        endpoints=tuple(chosen.values()),
        refused=tuple(entry for tag, entry in refused.items() if tag not in chosen),
        warnings=(),
    )
    return _with_warnings(plan, generation.in_flight, audit.max_at_risk_usd)


def keep_plan(recipe: Recipe, run: RunDirectory, endpoints: Sequence[Endpoint]) -> JsonObject:
    """Return `{expected, worst}` in US dollars as planned before the run's first request.

    The plan is written beside the answers at the first start; later starts read it, so that spend is compared with what
    was promised.
    """
    path = run.stage_path(Stage.COMPLETIONS) / PLAN_NAME
    if not path.is_file():
        commit_json(path, plan_cost(recipe, run, endpoints).to_json())
    plan: JsonObject = json.loads(path.read_bytes())
    return {"expected": plan["expected_usd"], "worst": plan["worst_usd"]}


def _cost_of(
    dataset: Dataset,
    selection: Selection,
    bounds: list[int],
    mean_prompt: float,
    num_samples: int,
    num_answered: int,
    known: float | None,
) -> DatasetCost:
    max_tokens = dataset.sampling.max_tokens
    cap, count = selection.cap, len(bounds)
    length = known if known is not None else max_tokens * UNKNOWN_LENGTH_SHARE
    return DatasetCost(
        dataset=dataset.name,
        num_samples=num_samples,
        num_answered=num_answered,
        prompt_tokens=round(count * mean_prompt),
        max_tokens=max_tokens,
        expected_tokens_per_answer=length,
        is_length_known=known is not None,
        expected_usd=money_up(count * selection.expected_usd(mean_prompt, length)),
        worst_usd=sum((cap.worst_usd(bound, max_tokens) for bound in bounds), Decimal(0)),
        reservation_usd=cap.worst_usd(max(bounds, default=0), max_tokens),
    )


def _with_warnings(plan: CostPlan, in_flight: int, max_at_risk_usd: Decimal) -> CostPlan:
    warnings: list[str] = []
    left_usd = plan.budget_usd - plan.spent_usd - plan.held_usd
    if plan.expected_usd > left_usd:
        warnings.append(
            f"about {_usd(plan.expected_usd)} are expected, {_usd(left_usd)} of the budget are left: the run will "
            "pause before it ends. Raise generation.budget_usd."
        )
    remaining = sum(cost.num_samples - cost.num_answered for cost in plan.datasets)
    wanted = min(in_flight, remaining)
    dearest_usd = max((cost.reservation_usd for cost in plan.datasets), default=Decimal(0))
    if plan.requests_at_once < wanted:
        warnings.append(
            f"the budget carries only {plan.requests_at_once} requests at once, {in_flight} are wanted: each reserves "
            f"up to {_usd(dearest_usd)}. Lower sampling.max_tokens or raise generation.budget_usd."
        )
    if plan.watched_at_once is not None and plan.watched_at_once < min(wanted, plan.requests_at_once):
        warnings.append(
            f"audit.max_at_risk_usd, {_usd(max_at_risk_usd)}, lets at most {plan.watched_at_once} requests go out at "
            f"once, {wanted} are wanted: each may cost up to {_usd(dearest_usd)}. For all of them it takes "
            f"{_usd(wanted * dearest_usd)}; or lower sampling.max_tokens."
        )
    guessed = [cost.dataset for cost in plan.datasets if not cost.is_length_known]
    if guessed:
        share = f"{UNKNOWN_LENGTH_SHARE:.0%}"
        warnings.append(f"lengths are guessed as {share} of max_tokens for {', '.join(guessed[:5])}")
    return replace(plan, warnings=tuple(warnings))


def _json_of(value: Any) -> Any:
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, dict):
        return {key: _json_of(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_json_of(item) for item in cast("Sequence[Any]", value)]
    return value


def _usd(amount: Decimal) -> str:
    return f"{amount:.2f} USD" if amount >= 1 else f"{amount:.6f} USD"


async def _list_endpoints(recipe: Recipe, run: RunDirectory, target: Path) -> Sequence[Endpoint]:
    state = run.stage_path(Stage.COMPLETIONS) / STATE_NAME
    async with open_provider(recipe, state if state.is_file() else None, target) as provider:
        return await provider.list_endpoints()
