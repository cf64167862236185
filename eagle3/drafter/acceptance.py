"""Counting accepted tokens: rounds of draft and verification over drafts that were made from every position.

Pure integer arithmetic; drafting itself is in `draft_model`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Outcome of many rounds."""

    num_rounds: int
    accepted_by_position: tuple[int, ...]
    """In how many rounds the draft's 1st, 2nd, ... token was accepted."""
    sum_of_squares: int
    """Of the accepted tokens per round; for the standard error."""

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens per round; 0 without rounds."""
        return sum(self.accepted_by_position) / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification pass of the target: the accepted ones and the one it gives itself."""
        return 1.0 + self.mean_accepted

    @property
    def standard_error(self) -> float:
        """Of the acceptance length, rounds taken as independent; 0 with fewer than two rounds."""
        if self.num_rounds < 2:
            return 0.0
        variance = (self.sum_of_squares - self.num_rounds * self.mean_accepted**2) / (self.num_rounds - 1)
        return math.sqrt(max(0.0, variance) / self.num_rounds)

    @property
    def rate_by_position(self) -> tuple[float, ...]:
        """Share of rounds in which the draft's 1st, 2nd, ... token was accepted."""
        return tuple(count / self.num_rounds if self.num_rounds else 0.0 for count in self.accepted_by_position)

    def __add__(self, other: "Acceptance") -> "Acceptance":
        """Join the rounds of two measurements with chains of the same length."""
        pairs = zip(self.accepted_by_position, other.accepted_by_position, strict=True)
        return Acceptance(
            num_rounds=self.num_rounds + other.num_rounds,
            accepted_by_position=tuple(mine + theirs for mine, theirs in pairs),
            sum_of_squares=self.sum_of_squares + other.sum_of_squares,
        )


def no_rounds(num_draft_tokens: int) -> Acceptance:
    """Return the neutral element of adding acceptances."""
    return Acceptance(num_rounds=0, accepted_by_position=(0,) * num_draft_tokens, sum_of_squares=0)


def play_rounds(chains: Sequence[Sequence[int]], input_ids: Sequence[int], num_prompt_tokens: int) -> Acceptance:
    """Replay greedy speculative decoding against the target's own greedy continuation.

    A round begins when the target has given a token. The draft proposes a chain; tokens are accepted as long as they
    are those of the continuation; then the target gives the next token itself, which begins the next round. Rounds
    that would run past the end of the continuation are not played, so every chain is judged in full.

    Args:
        chains: Row j drafts the tokens j+2, j+3, ... of the sequence, S each (see `DraftModel.draft_everywhere`).
        input_ids: Prompt and continuation, length T.
        num_prompt_tokens: Length of the prompt; the target's prefill gives the first token after it.

    Returns:
        What happened in all rounds.
    """
    num_steps = len(chains[0]) if chains else 0
    outcome = no_rounds(num_steps)
    last_token = num_prompt_tokens
    while last_token + num_steps < len(input_ids):
        chain, truth = chains[last_token - 1], input_ids[last_token + 1 : last_token + 1 + num_steps]
        accepted = 0
        while accepted < num_steps and chain[accepted] == truth[accepted]:
            accepted += 1
        outcome += Acceptance(
            num_rounds=1,
            accepted_by_position=tuple(int(position < accepted) for position in range(num_steps)),
            sum_of_squares=accepted**2,
        )
        last_token += accepted + 1
    return outcome
