"""Stage 8: measure what the draft is worth.

The target answers the held-out prompts greedily; then the draft's chains are compared with what the target said, round
by round, as an engine would. Files: `continuations.jsonl` (the target's answers as ids), `report.json`.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eagle3.artifacts import OpenStage, RunDirectory, ShardRef, Stage, StageManifest, commit_json, verify_shard
from eagle3.drafter.acceptance import Acceptance, no_rounds, play_rounds
from eagle3.drafter.continuation import TargetModel
from eagle3.drafter.dataset import CorpusRow, read_corpus
from eagle3.drafter.draft_model import DraftModel, load_draft, untrained_like
from eagle3.drafter.extra import import_torch, require_train_extra
from eagle3.drafter.target_facts import read_target_facts
from eagle3.drafter.training import CHECKPOINT_FOLDER
from eagle3.errors import EvaluationError
from eagle3.formats import read_json_lines, write_json_lines
from eagle3.progress import Progress, ProgressEvent, no_progress
from eagle3.recipe import Recipe

CONTINUATIONS_FILE = "continuations.jsonl"
REPORT_FILE = "report.json"
REPORT_SCHEMA = "eagle3.acceptance_report/1"
PERMUTATION_SAMPLES = 16
CLEAR_RATIO = 2.0
"""A well-wired draft accepts at least twice as much with its own layer order as with one that moves the last layer.
Source: measured 3x to 17x on a small head; two orders that keep the last layer in place cannot be told apart."""
SIGNIFICANT_ERRORS = 3.0
"""Standard errors by which another order must win before the wiring is called wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A held-out prompt with the target's greedy answer."""

    sample_id: str
    dataset: str
    input_ids: Sequence[int]
    num_prompt_tokens: int


def evaluate_draft(recipe: Recipe, run: RunDirectory, target: Path, progress: Progress = no_progress) -> StageManifest:
    """Measure acceptance of the sealed draft and of an untrained one, and seal the report.

    Args:
        recipe: Section `evaluation`; threads of `training`, precision of `hidden_states`.
        run: Holds the sealed corpus and draft.
        target: Prepared directory of the target.
        progress: Told about every batch and every sample.

    Returns:
        The sealed manifest; an earlier one when nothing changed.

    Raises:
        EvaluationError: The draft accepts no more than an untrained one, its layers are joined in the wrong order, or
            no continuation is long enough. The report is written all the same.
        StageDriftError: The evaluation was sealed from other settings.
    """
    corpus, sealed_draft = run.sealed(Stage.CORPUS), run.sealed(Stage.DRAFT)
    identity = {"evaluation": recipe.evaluation.identity(), "dtype": recipe.hidden_states.dtype}
    inputs = {manifest.stage.value: manifest.digest for manifest in (corpus, sealed_draft)}
    stage = run.open_stage(Stage.EVALUATION, identity, inputs)
    if stage.manifest is not None:
        return stage.manifest
    require_train_extra("torch", "transformers", "safetensors")
    for shard in sealed_draft.shards:
        verify_shard(run.stage_path(Stage.DRAFT), shard)
    draft = load_draft(run.stage_path(Stage.DRAFT) / CHECKPOINT_FOLDER)
    model = TargetModel(target, recipe.hidden_states.dtype, recipe.training.num_threads)
    prompts = held_out_prompts(read_corpus(run, corpus), recipe.evaluation.max_prompts)
    answers = _continuations(stage, recipe, model, prompts, read_target_facts(target).end_ids, progress)
    layer_ids: list[int] = sealed_draft.stats["layer_ids"]
    report = measure(
        draft,
        [continuation_from_json(line) for line in read_json_lines(stage.file(answers.path))],
        lambda continuation: model.features(continuation.input_ids, layer_ids),
        num_draft_tokens=recipe.evaluation.num_draft_tokens,
        num_layers=len(layer_ids),
        seed=recipe.seed,
        progress=progress,
    )
    commit_json(stage.file(REPORT_FILE), report)
    check_report(report, recipe.evaluation.min_acceptance_length)
    kept = partial(_copy_bytes, stage.file(REPORT_FILE).read_bytes())
    shards = [answers, stage.commit_shard(REPORT_FILE, kept, num_samples=answers.num_samples)]
    return stage.seal(shards, {key: report[key] for key in report if key not in ("schema", "datasets")})


def held_out_prompts(rows: Sequence[CorpusRow], max_prompts: int) -> list[CorpusRow]:
    """Return the first so many validation rows with distinct prompts.

    Several answers to one prompt share its greedy continuation: counted twice, it would only look like more evidence.
    """
    first_of: dict[tuple[int, ...], CorpusRow] = {}
    for row in rows:
        if row.split == "validation":
            first_of.setdefault(tuple(row.input_ids[: row.num_prompt_tokens]), row)
    return list(first_of.values())[:max_prompts]


def _copy_bytes(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _continuations(
    stage: OpenStage,
    recipe: Recipe,
    model: TargetModel,
    prompts: Sequence[CorpusRow],
    end_ids: Sequence[int],
    progress: Progress,
) -> ShardRef:
    existing = stage.existing_shard(CONTINUATIONS_FILE)
    if existing is not None:
        return existing

    def report(done: int) -> None:
        progress(ProgressEvent(stage="evaluation", label="target", done=done, total=len(prompts), unit="prompts"))

    answers = model.continue_greedily(
        [row.input_ids[: row.num_prompt_tokens] for row in prompts], end_ids, recipe.evaluation.max_new_tokens, report
    )
    lines: list[Mapping[str, Any]] = [
        {
            "sample_id": row.sample_id,
            "dataset": row.dataset,
            "num_prompt_tokens": row.num_prompt_tokens,
            "input_ids": [*row.input_ids[: row.num_prompt_tokens], *answer],
        }
        for row, answer in zip(prompts, answers, strict=True)
    ]

    def write(path: Path) -> None:
        write_json_lines(path, lines)

    num_tokens = sum(len(answer) for answer in answers)
    return stage.commit_shard(CONTINUATIONS_FILE, write, num_samples=len(lines), num_tokens=num_tokens)


def continuation_from_json(line: Mapping[str, Any]) -> Continuation:
    """Read one line of `continuations.jsonl`."""
    return Continuation(**{name: line[name] for name in ("sample_id", "dataset", "input_ids", "num_prompt_tokens")})


def measure(
    draft: DraftModel,
    continuations: Sequence[Continuation],
    features: Callable[[Continuation], Any],
    *,
    num_draft_tokens: int,
    num_layers: int,
    seed: int,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Play rounds for the draft, for an untrained one, and for wrong layer orders.

    Args:
        draft: The trained draft.
        continuations: Greedy answers of the target.
        features: Gives the captured layers [T, K] along a continuation.
        num_draft_tokens: Chain length k.
        num_layers: Captured layers L.
        seed: Of the untrained draft's weights.
        progress: Told after every sample.

    Returns:
        The report, plain JSON.

    Raises:
        EvaluationError: No continuation is long enough for a single round.
    """
    control = untrained_like(draft, seed)
    identity = tuple(range(num_layers))
    orders = [order for order in itertools.permutations(identity) if order[-1] != identity[-1]]
    trained: dict[str, Acceptance] = {}
    untrained = no_rounds(num_draft_tokens)
    in_order, moved = no_rounds(num_draft_tokens), {order: no_rounds(num_draft_tokens) for order in orders}
    proposable = frozenset(draft.target_ids_D.tolist())
    num_tokens = num_covered = 0
    for number, continuation in enumerate(continuations):
        play = partial(_play, continuation, features(continuation), num_layers, num_draft_tokens)
        outcome = play(draft, identity)
        trained[continuation.dataset] = trained.get(continuation.dataset, no_rounds(num_draft_tokens)) + outcome
        untrained += play(control, identity)
        if number < PERMUTATION_SAMPLES:
            in_order += outcome
            moved = {order: so_far + play(draft, order) for order, so_far in moved.items()}
        answer = continuation.input_ids[continuation.num_prompt_tokens :]
        num_tokens += len(answer)
        num_covered += sum(token in proposable for token in answer)
        total = sum(trained.values(), no_rounds(num_draft_tokens))
        progress(
            ProgressEvent(
                stage="evaluation",
                label="draft",
                done=number + 1,
                total=len(continuations),
                unit="prompts",
                values={"acceptance_length": round(total.acceptance_length, 3)},
            )
        )
    total = sum(trained.values(), no_rounds(num_draft_tokens))
    if total.num_rounds == 0:
        raise EvaluationError(
            f"none of {len(continuations)} continuations is longer than {num_draft_tokens + 1} tokens, so no round "
            "could be played. Raise evaluation.max_new_tokens, or hold out prompts with longer answers."
        )
    return {
        "schema": REPORT_SCHEMA,
        "acceptance_length_trained": round(total.acceptance_length, 4),
        "acceptance_length_untrained": round(untrained.acceptance_length, 4),
        "standard_error": round(total.standard_error, 4),
        "acceptance_by_position": [round(rate, 4) for rate in total.rate_by_position],
        "num_draft_tokens": num_draft_tokens,
        "rounds": total.num_rounds,
        "prompts": len(continuations),
        "continuation_tokens": num_tokens,
        "draft_vocab_coverage": round(num_covered / num_tokens, 4),
        "datasets": {name: _summary(outcome) for name, outcome in sorted(trained.items())},
        "layer_order": layer_order_verdict(in_order, moved),
    }


def _play(
    continuation: Continuation,
    features_TK: Any,
    num_layers: int,
    num_draft_tokens: int,
    draft: DraftModel,
    order: Sequence[int],
) -> Acceptance:
    """Play the rounds of one continuation with the captured layers in the given order."""
    torch = import_torch()
    chunks = features_TK.chunk(num_layers, dim=-1)
    arranged_TK = torch.cat([chunks[slot] for slot in order], dim=-1)
    with torch.inference_mode():
        chains = draft.draft_everywhere(torch.tensor(list(continuation.input_ids)), arranged_TK, num_draft_tokens)
    return play_rounds(chains.tolist(), continuation.input_ids, continuation.num_prompt_tokens)


def _summary(outcome: Acceptance) -> dict[str, Any]:
    return {
        "acceptance_length": round(outcome.acceptance_length, 4),
        "standard_error": round(outcome.standard_error, 4),
        "acceptance_by_position": [round(rate, 4) for rate in outcome.rate_by_position],
        "rounds": outcome.num_rounds,
    }


def layer_order_verdict(in_order: Acceptance, moved: Mapping[tuple[int, ...], Acceptance]) -> dict[str, Any]:
    """Say whether the captured layers reach the draft in the order it was trained with.

    Args:
        in_order: Rounds with ascending layers.
        moved: The same rounds with orders that move the last layer.

    Returns:
        `verdict`: `clear` when ascending accepts at least twice as much as every other order, `weak` when it does not,
        `wrong` when another order accepts significantly more.
    """
    if not moved or in_order.num_rounds == 0:
        return {"verdict": "not measured"}
    best_order, best = max(moved.items(), key=lambda item: item[1].mean_accepted)
    noise = SIGNIFICANT_ERRORS * math.hypot(in_order.standard_error, best.standard_error)
    if best.mean_accepted > in_order.mean_accepted + noise:
        verdict = "wrong"
    elif in_order.mean_accepted >= CLEAR_RATIO * best.mean_accepted and in_order.mean_accepted > 0:
        verdict = "clear"
    else:
        verdict = "weak"
    return {
        "verdict": verdict,
        "mean_accepted": round(in_order.mean_accepted, 4),
        "best_other_order": list(best_order),
        "mean_accepted_best_other": round(best.mean_accepted, 4),
    }


def check_report(report: Mapping[str, Any], min_acceptance_length: float) -> None:
    """Refuse a draft that is joined wrongly or learnt nothing.

    Raises:
        EvaluationError: Acceptance is at most `min_acceptance_length`, or another layer order accepts more.
    """
    found = float(report["acceptance_length_trained"])
    if found <= min_acceptance_length:
        raise EvaluationError(
            f"acceptance length is {found:.3f} ± {float(report['standard_error']):.3f} over {report['rounds']} rounds, "
            f"expected more than {min_acceptance_length} (an untrained draft reaches "
            f"{float(report['acceptance_length_untrained']):.3f}): something is joined wrongly, or training "
            "was far too short. Compare layer ids, final norm and draft vocabulary; see 8-evaluation/report.json."
        )
    order: Mapping[str, Any] = report["layer_order"]
    if order["verdict"] == "wrong":
        raise EvaluationError(
            f"with the captured layers in order {order['best_other_order']} the draft accepts "
            f"{order['mean_accepted_best_other']} tokens a round, in ascending order {order['mean_accepted']}: "
            "the layers were joined in another order in training than here. Extract and train again."
        )
