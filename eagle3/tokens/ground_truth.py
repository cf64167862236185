"""Rebuilt ids beside the ids that the server gave: how well reconstruction does where the truth is known. Pure."""

from enum import StrEnum

from eagle3.records import Exactness, SegmentKind, TokenSample


class Agreement(StrEnum):
    """How rebuilt completion ids compare with true ones, best first."""

    IDENTICAL = "identical"
    FLAGGED = "drifted_and_flagged"
    """They differ, and the sample is graded as a mismatch or every wrong id is masked from the loss."""
    UNSEEN_SAME_LENGTH = "drifted_unseen_same_length"
    """They differ where no count can show it: as many ids, other cuts."""
    UNSEEN = "drifted_unseen"
    """They differ, and nothing tells."""


def compare_with_truth(rebuilt: TokenSample, given: TokenSample) -> Agreement:
    """Say how the ids rebuilt from text compare with the ids of the same answer as the server gave them.

    Args:
        rebuilt: Made without looking at native ids.
        given: Made from native ids.
    """
    ids = list(rebuilt.input_ids[rebuilt.num_prompt_tokens :])
    true = list(given.input_ids[given.num_prompt_tokens :])
    if ids == true:
        return Agreement.IDENTICAL
    if rebuilt.exactness in (Exactness.MISMATCH, Exactness.UNVERIFIED) or _wrong_ids_are_masked(rebuilt, ids, true):
        return Agreement.FLAGGED
    return Agreement.UNSEEN_SAME_LENGTH if len(ids) == len(true) else Agreement.UNSEEN


def _wrong_ids_are_masked(rebuilt: TokenSample, ids: list[int], true: list[int]) -> bool:
    masked = {
        position - rebuilt.num_prompt_tokens
        for segment in rebuilt.segments
        if segment.kind is SegmentKind.AMBIGUOUS
        for position in range(segment.start, segment.stop)
    }
    return all(place in masked or true[place : place + 1] == [token_id] for place, token_id in enumerate(ids))
