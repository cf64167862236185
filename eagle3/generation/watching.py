"""Looking at answers while others are still bought, so that little money is at risk when a provider goes wrong.

What is looked for is not known here: the caller gives a `Check`. This module reads finished answers back, hands them
over in small batches on a thread of their own, and says how much money lies in answers nobody has looked at yet.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeAlias

from eagle3.errors import Eagle3Error
from eagle3.generation.journal_lines import Place
from eagle3.records import Completion, JsonObject, PromptRecord

Answered: TypeAlias = tuple[PromptRecord, Completion]
Check: TypeAlias = Callable[[Sequence[Answered]], None]
"""Looks at answers in the order in which they came; raises an `Eagle3Error` when no more should be bought."""

PAUSE_S = 0.5
"""Between two looks while requests are not held back by them: a batch costs less than its answers one by one."""
KNOWN_PORTION = 16
"""Answers per look when those of an earlier process are shown again."""
MAX_KNOWN = 2000
"""Answers of earlier processes that are looked at before anything is bought."""

_ZERO = Decimal(0)


@dataclass(slots=True)
class AnswerWatch:
    """Bounds the money in answers that nobody has looked at yet. Lives on the session's event loop."""

    check: Check
    bound_usd: Decimal
    """Most money in answers not looked at and in requests under way, those at their dearest."""
    read: Callable[[PromptRecord, Place], Completion]
    """Reads an answer back from the journal; called on another thread."""
    unseen_usd: Decimal = _ZERO
    """Cost of the answers nobody has looked at yet."""
    peak_usd: Decimal = _ZERO
    """Most money that was at risk at one time."""
    num_seen: int = 0
    num_looks: int = 0
    _new: list[tuple[PromptRecord, Place, Decimal]] = field(default_factory=list[tuple[PromptRecord, Place, Decimal]])
    _num_known: int = 0
    _num_known_waiting: int = 0
    _arrival: asyncio.Event = field(default_factory=asyncio.Event)
    _starved: asyncio.Event = field(default_factory=asyncio.Event)

    def known(self, prompt: PromptRecord, place: Place) -> None:
        """Take an answer that an earlier process paid for; it is looked at before anything is bought."""
        if self._num_known >= MAX_KNOWN:
            return
        self._num_known += 1
        self._num_known_waiting += 1
        self._new.append((prompt, place, _ZERO))
        self._arrival.set()

    def arrived(self, prompt: PromptRecord, place: Place, cost_usd: Decimal) -> None:
        """Take an answer that was just paid for."""
        self.unseen_usd += cost_usd
        self._new.append((prompt, place, cost_usd))
        self._arrival.set()

    def admits(self, reserved_usd: Decimal, amount_usd: Decimal) -> bool:
        """Return whether one more request may go out.

        One request alone always may, so that a bound below the price of a request slows a run and does not stop it.

        Args:
            reserved_usd: Dearest outcome of all requests under way.
            amount_usd: Dearest outcome of the next one.
        """
        at_risk_usd = self.unseen_usd + reserved_usd
        is_alone = at_risk_usd == _ZERO and not self._new
        if not self._num_known_waiting and (is_alone or at_risk_usd + amount_usd <= self.bound_usd):
            self.peak_usd = max(self.peak_usd, at_risk_usd + amount_usd)
            return True
        self._starved.set()
        return False

    async def look_forever(self, cleared: Callable[[], None], stop: Callable[[Eagle3Error], None]) -> None:
        """Look at answers as they come, until the check objects.

        Args:
            cleared: Called after each look that found nothing.
            stop: Called once with the check's objection.
        """
        while True:
            await self._arrival.wait()
            if not self._starved.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PAUSE_S):
                        await self._starved.wait()
            self._arrival.clear()
            self._starved.clear()
            batch, self._new = self._new, []
            num_known = self._num_known_waiting  # nothing is bought until these were looked at
            if num_known:
                # They were handed over in the order of their prompts; a change shows in the order of arrival.
                batch.sort(key=lambda entry: entry[1].age)
            try:
                # A look learns habits from all it has seen, so known answers are shown in the portions they came in.
                size = KNOWN_PORTION if num_known else max(1, len(batch))
                for start in range(0, len(batch), size):
                    await asyncio.to_thread(self._look, batch[start : start + size])
            except Eagle3Error as exc:
                stop(exc)
                return
            self._num_known_waiting -= num_known
            self.num_seen += len(batch)
            self.num_looks += 1
            self.unseen_usd -= sum((cost_usd for _, _, cost_usd in batch), _ZERO)
            cleared()

    def risk(self, reserved_usd: Decimal) -> str:
        """Return for people how much money is at risk right now."""
        return (
            f"At risk are {self.unseen_usd:f} USD in answers that were not cleared and at most {reserved_usd:f} USD in "
            f"requests under way; audit.max_at_risk_usd is {self.bound_usd:f} USD."
        )

    def to_json(self) -> JsonObject:
        """Return the figures of the watch, for the stage's stats."""
        return {
            "looks": self.num_looks,
            "answers": self.num_seen,
            "peak_at_risk_usd": f"{self.peak_usd:f}",
            "max_at_risk_usd": f"{self.bound_usd:f}",
        }

    def _look(self, batch: Sequence[tuple[PromptRecord, Place, Decimal]]) -> None:
        self.check([(prompt, self.read(prompt, place)) for prompt, place, _ in batch])
