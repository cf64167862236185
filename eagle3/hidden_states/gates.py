"""Gates: checks that stored hidden states are what their contract says, each with the faults it catches.

| gate | catches |
|---|---|
| values | NaN, infinity, states never written |
| target | last state taken after the final norm, shift by a token, weights or tokenizer of another model |
| order | slots permuted |
| identity | layer ids off by one, neighbouring slots swapped: faults that acceptance alone does not show |

Suffixes: N positions, T tokens, L captured layers, H hidden. Agreement is the share of response positions whose state
predicts the next id by argmax(lm_head(norm(state))), the "logit lens".
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.errors import GateError
from eagle3.hidden_states.backend import Backend
from eagle3.hidden_states.contract import CaptureContract
from eagle3.records import JsonObject

SHIFT_FACTOR = 2.0
"""How far agreement must lie above that with the neighbouring ids. A shifted store has the two swapped (0.005 against
0.985 on a real model), so any factor well above 1 separates them."""
IDENTITY_TOLERANCE = {"bfloat16": 5e-2, "float32": 1e-3}
"""Largest mean relative error of a slot against the plain model. Rounding differs with the batch shape; measured on the
example target: 0.014 in bfloat16."""
IDENTITY_MARGIN = 2.0
"""How many times nearer a slot must be to its own layer than to any other."""
NUM_PROBES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSample:
    """One stored row as the gates see it."""

    row: int
    input_ids: Sequence[int]
    loss_mask: Sequence[bool]
    """Which ids the target generated, length T."""
    hidden_TLH: Any  # noqa: N815 - shape suffix
    """torch tensor [T, L+1, H], read back from the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LensReport:
    """Logit-lens agreement of every slot over all response positions."""

    num_positions: int
    agreement: Sequence[float]
    """Per slot: the state at position t predicts the id at t+1."""
    agreement_before: float
    """Last slot against the id at t: high when states lie one position too late."""
    agreement_after: float
    """Last slot against the id at t+2: high when states lie one position too early."""
    median_rms: Sequence[float]
    """Per slot: median over tokens of the root mean square; a fingerprint to compare backends by."""


def check_values(row: int, hidden_TLH: Any) -> None:  # noqa: N803
    """Require finite states, none of them all zero.

    Raises:
        GateError: With the first place where it shows.
    """
    torch: Any = importlib.import_module("torch")
    peak_TL = hidden_TLH.abs().amax(dim=-1)  # noqa: N806
    bad_TL = ~torch.isfinite(peak_TL) | (peak_TL == 0)  # noqa: N806
    if bool(bad_TL.any()):
        token, slot = (int(index) for index in bad_TL.nonzero()[0])
        what = "all zero" if float(peak_TL[token, slot]) == 0 else "not finite"
        raise GateError(
            f"value gate: hidden states of row {row} are {what} at token {token}, slot {slot} "
            f"({int(bad_TL.sum())} of {bad_TL.numel()} states are bad). Extract with hidden_states.dtype float32; if "
            "that does not help, the target's weights are damaged."
        )


def measure_lens(samples: Sequence[GateSample], backend: Backend) -> LensReport:
    """Measure what each slot predicts at the response positions of all samples.

    Raises:
        GateError: The samples hold no response position.
    """
    torch: Any = importlib.import_module("torch")
    states: list[Any] = []
    before: list[int] = []
    following: list[int] = []
    after: list[int] = []
    for sample in samples:
        ids, mask = sample.input_ids, sample.loss_mask
        positions = [t for t in range(len(ids) - 1) if mask[t + 1]]
        states.append(sample.hidden_TLH[torch.tensor(positions, dtype=torch.int64)])
        before.extend(ids[t] for t in positions)
        following.extend(ids[t + 1] for t in positions)
        # No id is negative, so the position after the last one agrees with nothing.
        after.extend(ids[t + 2] if t + 2 < len(ids) else -1 for t in positions)
    if not following:
        raise GateError(
            f"target gate: none of the {len(samples)} samples has a response position with loss. Raise "
            "hidden_states.gate_samples, or look at the loss masks of the corpus."
        )
    hidden_NLH = torch.cat(states)  # noqa: N806
    predicted_LN = [backend.predict(hidden_NLH[:, slot]) for slot in range(hidden_NLH.shape[1])]  # noqa: N806

    def agreement(slot: int, wanted: list[int]) -> float:
        return float((predicted_LN[slot] == torch.tensor(wanted)).float().mean())

    all_TLH = torch.cat([sample.hidden_TLH for sample in samples])  # noqa: N806
    rms_L = all_TLH.float().square().mean(dim=-1).sqrt().median(dim=0).values  # noqa: N806
    return LensReport(
        num_positions=len(following),
        agreement=[agreement(slot, following) for slot in range(len(predicted_LN))],
        agreement_before=agreement(-1, before),
        agreement_after=agreement(-1, after),
        median_rms=[float(value) for value in rms_L],
    )


def chance(num_positions: int) -> float:
    """Return two standard errors of a share measured at so many positions, at its widest."""
    return 1 / math.sqrt(num_positions)


def target_gate(report: LensReport, min_agreement: float) -> None:
    """Require that the last slot predicts the response, and predicts it where it should.

    Args:
        report: Of stored samples whose responses the target itself generated.
        min_agreement: Smallest share of positions.

    Raises:
        GateError: With the agreement of every slot and of the shifted variants.
    """
    last = report.agreement[-1]
    shifted = max(report.agreement_before, report.agreement_after)
    if last >= min_agreement and last >= SHIFT_FACTOR * shifted:
        return
    noise = chance(report.num_positions)
    if shifted > last + noise:
        side = "late" if report.agreement_before >= report.agreement_after else "early"
        cause = f"states lie one token too {side}; align them with token_ids"
    elif max(report.agreement) > last + noise:
        cause = "another slot predicts better than the last: the slots are permuted, or the last is not pre-norm"
    elif last < min_agreement:
        cause = (
            "the last state is not pre-norm, or weights or tokenizer are not those of the model that wrote the "
            "responses; responses sampled at high temperature agree less: then lower hidden_states.min_target_agreement"
        )
    else:
        cause = "the responses repeat themselves too much to tell positions apart; raise hidden_states.gate_samples"
    raise GateError(
        f"target gate: the last slot predicts the next token at {last:.3f} of {report.num_positions} response "
        f"positions, expected at least {min_agreement:.3f} and {SHIFT_FACTOR:g} times the shifted agreement "
        f"({report.agreement_before:.3f} one token back, {report.agreement_after:.3f} one token on); slots agree "
        f"{_numbers(report.agreement)}. Likely cause: {cause}."
    )


def order_gate(report: LensReport) -> None:
    """Require that agreement rises from slot to slot, as states near the output know more of it.

    A fall within two standard errors is chance.

    Raises:
        GateError: With the agreement of every slot.
    """
    slack = chance(report.num_positions)
    for slot, (lower, higher) in enumerate(zip(report.agreement, report.agreement[1:], strict=False)):
        if lower > higher + slack:
            raise GateError(
                f"order gate: slot {slot} predicts the next token at {lower:.3f} of {report.num_positions} positions, "
                f"slot {slot + 1} at {higher:.3f}, expected a rise from slot to slot; all slots: "
                f"{_numbers(report.agreement)}. The slots are not in ascending layer order: fix the backend and run "
                "with '--redo extract'."
            )


def identity_gate(samples: Sequence[GateSample], contract: CaptureContract, backend: Backend) -> list[float]:
    """Require that each slot is the layer it claims to be, against the plain model.

    Distance is the mean over tokens of the relative error of each token's state, so that a first token of huge norm
    does not drown the others. The last slot is compared after the final norm, which ignores the scale of a state.

    Returns:
        Distance of each slot to its own layer.

    Raises:
        GateError: A slot is nearer to another layer, or too far from its own.
    """
    torch: Any = importlib.import_module("torch")
    probes = sorted(samples, key=lambda sample: (len(sample.input_ids), sample.row))[:NUM_PROBES]
    num_layers = contract.num_layers
    sums_LJ = torch.zeros(contract.num_slots, num_layers + 1, dtype=torch.float64)  # noqa: N806
    num_tokens = sum(len(sample.input_ids) for sample in probes)
    for sample in probes:
        reference_JTH = backend.reference_states(sample.input_ids)  # noqa: N806
        raw_JTH, normed_JTH = reference_JTH[:-1], [backend.final_norm(state) for state in reference_JTH[:-1]]  # noqa: N806
        for slot in range(contract.num_slots - 1):
            for layer, state in enumerate(raw_JTH):
                sums_LJ[slot, layer] += _error_sum(sample.hidden_TLH[:, slot], state)
            sums_LJ[slot, num_layers] = math.inf
        last_TH = backend.final_norm(sample.hidden_TLH[:, -1])  # noqa: N806
        for layer, state in enumerate([*normed_JTH, reference_JTH[-1]]):
            sums_LJ[-1, layer] += _error_sum(last_TH, state)
    distances_LJ = sums_LJ / num_tokens  # noqa: N806
    own = [*contract.layer_ids, num_layers]
    tolerance = IDENTITY_TOLERANCE[contract.dtype]
    for slot, layer in enumerate(own):
        row: list[float] = distances_LJ[slot].tolist()
        nearest = min(range(len(row)), key=row.__getitem__)
        others = [distance for index, distance in enumerate(row) if index != layer]
        if nearest != layer or row[layer] > tolerance or row[layer] * IDENTITY_MARGIN > min(others):
            claimed = "the pre-norm output of the last layer" if slot == len(own) - 1 else f"the input of layer {layer}"
            raise GateError(
                f"identity gate: slot {slot} should hold {claimed}, at relative distance {row[layer]:.4f} (at most "
                f"{tolerance:g} is rounding); nearest is layer {nearest} at {row[nearest]:.4f}, and the nearest other "
                f"layer lies at {min(others):.4f}, expected {IDENTITY_MARGIN:g} times the slot's own. Layer ids are "
                "off, slots swapped, the last state is not pre-norm, or the weights differ: fix the backend and run "
                "with '--redo extract'."
            )
    return [float(distances_LJ[slot, layer]) for slot, layer in enumerate(own)]


def run_gates(
    samples: Sequence[GateSample], contract: CaptureContract, backend: Backend, min_target_agreement: float
) -> JsonObject:
    """Run all gates on stored samples and return their figures.

    Raises:
        GateError: From the first gate that fails.
    """
    for sample in samples:
        check_values(sample.row, sample.hidden_TLH)
    report = measure_lens(samples, backend)
    target_gate(report, min_target_agreement)
    order_gate(report)
    distances = identity_gate(samples, contract, backend)
    return {
        "samples": len(samples),
        "positions": report.num_positions,
        "agreement_by_slot": [round(value, 4) for value in report.agreement],
        "agreement_shifted": [round(report.agreement_before, 4), round(report.agreement_after, 4)],
        "min_target_agreement": min_target_agreement,
        "identity_distance_by_slot": [round(value, 6) for value in distances],
        "median_rms_by_slot": [round(value, 4) for value in report.median_rms],
        "computed_in": backend.compute_dtype,
    }


def _error_sum(found_TH: Any, expected_TH: Any) -> float:  # noqa: N803
    """Return the sum over tokens of |found - expected| / |expected|."""
    expected = expected_TH.float()
    return float(((found_TH.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).sum())


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
