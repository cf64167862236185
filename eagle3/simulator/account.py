"""The pretend account: what it holds, what it spent, and when it refuses. Decimal throughout, no I/O."""

from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from typing import Literal

ZERO = Decimal(0)
PER_MTOK = Decimal(1_000_000)


def price(tokens: int, usd_per_mtok: Decimal) -> Decimal:
    """Exact price in USD of `tokens` at a price per million."""
    return tokens * usd_per_mtok / PER_MTOK


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why the account does not pay for a request."""

    status: Literal[402, 403]
    message: str


class Account:
    """Balance and spend of one account with one inference key.

    As at the real service, requests in flight are not reserved: a request is checked against what *finished* requests
    spent, so the account can be overdrawn by what is in flight when it runs dry.
    """

    def __init__(self, *, credits_usd: Decimal, key_limit_usd: Decimal | None, usage_usd: Decimal = ZERO) -> None:
        """Open an account; a null limit leaves the key bounded by the credits alone."""
        self.credits_usd = credits_usd
        self.key_limit_usd = key_limit_usd
        self.usage_usd = usage_usd

    @property
    def remaining_usd(self) -> Decimal:
        """Credits left; negative when overdrawn."""
        return self.credits_usd - self.usage_usd

    @property
    def key_remaining_usd(self) -> Decimal | None:
        """What the key may still spend, never negative; null without a limit."""
        return None if self.key_limit_usd is None else max(ZERO, self.key_limit_usd - self.usage_usd)

    def refuse(self, *, max_tokens: int, completion_usd_per_mtok: Decimal) -> Refusal | None:
        """Check a request before it is routed.

        Args:
            max_tokens: The most tokens the answer may have, as asked for or by the model's default.
            completion_usd_per_mtok: Price of the endpoint that would answer.

        Returns:
            403 when the key's limit is spent, 402 when the balance is, or when it cannot pay `max_tokens`; else None.
        """
        if self.key_limit_usd is not None and self.usage_usd >= self.key_limit_usd:
            return Refusal(
                status=403,
                message="Key limit exceeded (total limit). Manage it using https://openrouter.ai/settings/keys",
            )
        if self.remaining_usd <= 0:
            return Refusal(
                status=402,
                message="Insufficient credits. Add more using https://openrouter.ai/settings/credits",
            )
        affordable = self._affordable_tokens(self.remaining_usd, completion_usd_per_mtok)
        advice = "visit https://openrouter.ai/settings/credits and add more credits"
        if self.key_remaining_usd is not None:
            by_key = self._affordable_tokens(self.key_remaining_usd, completion_usd_per_mtok)
            if by_key < affordable:
                affordable = by_key
                advice = "visit https://openrouter.ai/settings/keys and create a key with a higher monthly limit"
        if max_tokens > affordable:
            return Refusal(
                status=402,
                message=(
                    "This request requires more credits, or fewer max_tokens. You requested up to "
                    f"{max_tokens} tokens, but can only afford {affordable}. To increase, {advice}"
                ),
            )
        return None

    def bill(self, amount_usd: Decimal) -> None:
        """Charge a finished generation."""
        self.usage_usd += amount_usd

    @staticmethod
    def _affordable_tokens(balance_usd: Decimal, usd_per_mtok: Decimal) -> Decimal:
        if usd_per_mtok == 0:
            return Decimal("Infinity")
        return (balance_usd * PER_MTOK / usd_per_mtok).to_integral_value(rounding=ROUND_FLOOR)
