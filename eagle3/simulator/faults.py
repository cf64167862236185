"""Which request fails and how long each takes. Pure functions of the seed and the prompt."""

import math
from statistics import NormalDist

from eagle3.simulator.scenario import Fault, Latency, Provider, Scenario, draw

_NORMAL = NormalDist()


def choose_fault(scenario: Scenario, *, sample_key: str, provider: Provider, attempt: int) -> Fault | None:
    """The fault this attempt meets: the first of the scenario's list that hits the prompt, or None.

    Args:
        scenario: Its seed and its list of faults.
        sample_key: Digest of the messages, seed and metadata of the request.
        provider: The endpoint that answers.
        attempt: Attempts of the same sample before this one.
    """
    for index, fault in enumerate(scenario.faults):
        if fault.provider is not None and not provider.is_named(fault.provider):
            continue
        if attempt < fault.first_attempts and draw(scenario.seed, "fault", index, sample_key) < fault.share:
            return fault
    return None


def latency_s(latency: Latency, *, seed: int, sample_key: str, attempt: int, tokens: int) -> float:
    """Seconds (before `time_scale`) from request to complete reply for one attempt."""
    deviation = _NORMAL.inv_cdf(draw(seed, "latency", sample_key, attempt))
    return latency.median_s * math.exp(latency.sigma * deviation) + latency.per_token_s * tokens
