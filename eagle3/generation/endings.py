"""What ends a sample and what ends the sending, with the words for people. Pure."""

from collections.abc import Collection
from decimal import Decimal

from eagle3.errors import BudgetReachedError, CredentialsError, CreditsExhaustedError, Eagle3Error, RunRejectedError
from eagle3.generation.history import SampleHistory
from eagle3.generation.ledger import Ledger
from eagle3.providers.classify import Outcome, Verdict
from eagle3.records import FailureClass

MAX_BAD_ANSWERS = 3
"""Empty or unfinished answers are billed; more of them for one prompt say that it gets no better."""


def final_failure(sample: SampleHistory, outcome: Outcome, max_attempts: int) -> FailureClass | None:
    """Return why the sample is given up, or None when it is asked again."""
    if outcome.verdict is Verdict.SAMPLE_REJECTED:
        return FailureClass.REJECTED
    if outcome.verdict is Verdict.BAD_ANSWER and sample.bad_answers >= MAX_BAD_ANSWERS:
        return FailureClass.EMPTY if outcome.rule == "empty" else FailureClass.MALFORMED
    if sample.tries < max_attempts:
        return None
    if outcome.verdict is Verdict.AMBIGUOUS:
        return FailureClass.MALFORMED if outcome.rule == "malformed" else FailureClass.AMBIGUOUS
    return FailureClass.RETRIES_EXHAUSTED


def reason_to_halt(outcome: Outcome, spent_usd: Decimal) -> Eagle3Error | None:
    """Return the error that ends all sending, or None when the outcome concerns one request."""
    if outcome.verdict is Verdict.OUT_OF_CREDITS:
        return CreditsExhaustedError(
            f"the provider cannot be paid: {_sentence(outcome.message)} Spent so far: {plain_usd(spent_usd)} USD. "
            "Everything received is kept. Top up the account or raise the key's limit, then run again."
        )
    if outcome.verdict is Verdict.CREDENTIALS:
        return CredentialsError(f"the API key was refused: {outcome.message} Check the key's environment variable.")
    if outcome.verdict is Verdict.RUN_REJECTED:
        return RunRejectedError(
            f"no request can work as the recipe is: {outcome.message} Check model, routing and prices, then run again."
        )
    return None


def budget_reached(ledger: Ledger, amount_usd: Decimal) -> BudgetReachedError:
    """Return the error for a budget that cannot carry one more request."""
    return BudgetReachedError(
        f"the budget of {plain_usd(ledger.budget_usd)} USD cannot carry the next request, which may cost up to "
        f"{plain_usd(amount_usd)} USD: {plain_usd(ledger.spent_usd)} USD are spent and {plain_usd(ledger.held_usd)} "
        "USD are held for requests of unknown fate. Everything received is kept. Raise generation.budget_usd or lower "
        "sampling.max_tokens, then run again."
    )


def all_rejected(count: int, outcome: Outcome) -> RunRejectedError:
    """Return the error for a run whose first samples were all rejected."""
    return RunRejectedError(
        f"the first {count} samples were all rejected, the last with: {outcome.message} Check the model, sampling and "
        "prompts of the recipe, then run again."
    )


def stranger(outcome: Outcome, known: Collection[str]) -> RunRejectedError | None:
    """Return the error for an answer by a provider that no snapshot lists, compared in lower case."""
    provider = outcome.provider
    if provider is None or provider.lower() in known:
        return None
    return RunRejectedError(
        f"provider {provider!r} answered although it is not among the endpoints listed at the start "
        f"({', '.join(sorted(known)[:5])}). The routing was not obeyed, so precision and price are unknown. Check "
        "generation.provider.routing, then run again."
    )


def again(error: Eagle3Error) -> Eagle3Error:
    """Return a fresh copy, so that several callers can raise it."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def plain_usd(amount: Decimal) -> str:
    """Write an amount exactly, without the zeros that its arithmetic left at the end."""
    return f"{amount.normalize():f}"


def _sentence(text: str) -> str:
    """End words of a provider, so that ours can follow."""
    return text if text.rstrip().endswith((".", "!", "?")) else f"{text.rstrip()}."
