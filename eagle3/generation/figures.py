"""The figures of the stage's books, as its manifest keeps them. Pure."""

from collections.abc import Mapping

from eagle3.generation.history import History, Tally
from eagle3.generation.ledger import Ledger
from eagle3.records import JsonObject


def book_figures(history: History, ledger: Ledger, totals: Mapping[str, int]) -> JsonObject:
    """Return what was bought and what it cost, money as text.

    `spent_usd` was charged for certain, `held_usd` is the most that `held_requests` of unknown fate can have cost
    beside it, and `at_most_usd` is both: the bill lies between the first and the last.

    Args:
        history: Of the run.
        ledger: Of the run.
        totals: Samples by dataset.
    """
    tallies = list(history.by_dataset.values())
    return {
        "spent_usd": f"{ledger.spent_usd:f}",
        "held_usd": f"{ledger.held_usd:f}",
        "held_requests": len(tuple(ledger.all_holds())),
        "at_most_usd": f"{ledger.spent_usd + ledger.held_usd:f}",
        "budget_usd": f"{ledger.budget_usd:f}",
        "unexplained_usd": f"{ledger.unexplained_usd:f}",
        "samples": sum(tally.samples for tally in tallies),
        "failed": sum(tally.failed for tally in tallies),
        "prompt_tokens": sum(tally.prompt_tokens for tally in tallies),
        "completion_tokens": sum(tally.completion_tokens for tally in tallies),
        "by_provider": {name: tally.as_json() for name, tally in sorted(history.by_provider.items())},
        "datasets": {name: history.tally(name).as_json() for name in totals},
        "paid_twice": history.paid_twice,
        "left_out": {name: total - num_ended(history.tally(name)) for name, total in totals.items()},
        "unanswered_requests": dict(sorted(history.verdicts.items())),
    }


def num_ended(tally: Tally) -> int:
    """Return how many samples of a dataset are final."""
    return tally.samples + tally.failed
