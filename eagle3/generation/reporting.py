"""Where generation stands, as progress events: answers, dollars and time, in all, by dataset and by provider. Pure."""

from collections.abc import Iterator, Mapping

from eagle3.generation.history import History, Tally
from eagle3.generation.ledger import Ledger
from eagle3.progress import ProgressEvent

MIN_KNOWN_ANSWERS = 20
"""Fewer answers of a dataset say little about what its others will cost."""


def progress_events(
    history: History, ledger: Ledger, totals: Mapping[str, int], *, in_flight: int, num_refused: int
) -> Iterator[ProgressEvent]:
    """Return one event for the whole stage, and one per dataset when there are several.

    Args:
        history: What was bought.
        ledger: What it cost.
        totals: Samples of each dataset.
        in_flight: Requests under way.
        num_refused: Requests that were refused for their rate.
    """
    tallies = {name: history.tally(name) for name in totals}
    values: dict[str, float | int | str] = {
        "spent_usd": float(ledger.spent_usd),
        "held_usd": float(ledger.held_usd),
        "budget_usd": float(ledger.budget_usd),
        "in_flight": in_flight,
        "rate_limited": num_refused,
        "failed": sum(tally.failed for tally in tallies.values()),
        "completion_tokens": sum(tally.completion_tokens for tally in tallies.values()),
    }
    expected_usd = expected_total_usd(float(ledger.spent_usd), tallies, totals, in_flight)
    if expected_usd is not None:
        values["expected_usd"] = expected_usd
    providers = {
        name: {"answers": tally.samples, "spent_usd": float(tally.cost_usd)}
        for name, tally in sorted(history.by_provider.items())
    }
    done = sum(_ended(tally) for tally in tallies.values())
    total = sum(totals.values())
    yield ProgressEvent(stage="generation", done=done, total=total, values=values, providers=providers)
    if len(totals) == 1:
        return
    for name, tally in tallies.items():
        own: dict[str, float | int | str] = {
            "spent_usd": float(tally.cost_usd),
            "failed": tally.failed,
            "completion_tokens": tally.completion_tokens,
        }
        yield ProgressEvent(stage="generation", label=name, done=_ended(tally), total=totals[name], values=own)


def expected_total_usd(
    spent_usd: float, tallies: Mapping[str, Tally], totals: Mapping[str, int], in_flight: int
) -> float | None:
    """Return what the whole stage will have cost when the answers to come cost what those of their dataset did.

    None while a dataset with open samples is hardly known, or while fewer answers are there than are under way: those
    are the short ones.
    """
    left = {name: totals[name] - _ended(tally) for name, tally in tallies.items()}
    is_known = all(tally.samples >= MIN_KNOWN_ANSWERS for name, tally in tallies.items() if left[name] > 0)
    if not is_known or sum(tally.samples for tally in tallies.values()) < in_flight:
        return None
    rest_usd = sum(
        count * float(tallies[name].cost_usd) / tallies[name].samples for name, count in left.items() if count > 0
    )
    return spent_usd + rest_usd


def _ended(tally: Tally) -> int:
    return tally.samples + tally.failed
