"""What a simulator remembers: the account, every generation, the response cache, attempts and counters.

With a file, each change is appended to it as one JSON line, so that a restart goes on where the last one stopped; a
torn last line is dropped. Nothing here decides anything: the chat endpoint does.
"""

import json
from collections import Counter, OrderedDict
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Self, cast

from eagle3.errors import ConfigurationError
from eagle3.simulator.account import ZERO, Account
from eagle3.simulator.scenario import AccountStart

Json = dict[str, Any]

CACHE_ENTRIES = 50_000
"""Replies kept in the response cache; the oldest go first, as eviction is possible at the real service too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One reply as the service knows it: the truth that tests compare a client's books with."""

    id: str
    created_s: float
    """Unix time of the request."""
    ready_s: float
    """Unix time from which `/generation` answers."""
    model: str
    provider: str
    messages_key: str
    body_digest: str
    attempt: int
    """Attempts of the same sample before this one."""
    prompt_tokens: int
    completion_tokens: int
    """As billed."""
    reasoning_tokens: int
    cost_usd: Decimal
    finish_reason: str | None
    output_ids: tuple[int, ...]
    """What the model really produced; empty when the reply holds no answer of the model."""
    fault: str | None = None
    """Kind of the fault this reply met."""
    is_streamed: bool = False
    is_cancelled: bool = False
    cache_source_id: str | None = None
    """The generation a cached reply repeats."""
    latency_s: float = 0.0

    def to_json(self) -> Json:
        """JSON form; money as a decimal string."""
        # Not dataclasses.asdict: it copies every token id, which costs more than the rest of a request.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "cost_usd": f"{self.cost_usd:f}", "output_ids": list(self.output_ids)}

    @classmethod
    def from_json(cls, document: Json) -> Self:
        """Inverse of `to_json`."""
        values: Json = {**document, "cost_usd": Decimal(document["cost_usd"])}
        values["output_ids"] = tuple(document["output_ids"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedReply:
    """A reply kept for byte-identical requests."""

    body: Json
    """The whole `chat.completion` body."""
    generation_id: str
    stored_s: float
    expires_s: float


class Counters:
    """Numbers for `/_admin/stats`; they start at zero with the process."""

    def __init__(self) -> None:
        """Start at zero."""
        self.in_flight = 0
        self.connections = 0
        self.reset()

    def reset(self) -> None:
        """Start counting afresh; what is open now stays counted."""
        self.requests = 0
        self.peak_in_flight = self.in_flight
        self.statuses: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self.cache_hits = 0

    def enter(self) -> None:
        """A chat request was read."""
        self.requests += 1
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)

    def leave(self) -> None:
        """A chat request was answered, or lost and billed."""
        self.in_flight -= 1


class State:
    """Everything that changes while the simulator runs."""

    def __init__(self, start: AccountStart, path: Path | None = None) -> None:
        """Begin with `start`, or where the file at `path` left off.

        Raises:
            ConfigurationError: The file is not one of ours.
        """
        self._start = start
        self._path = path
        self._pending: list[Json] = []
        self.counters = Counters()
        self._clear()
        if path is not None:
            self._replay(path)

    def _clear(self) -> None:
        self.account = Account(credits_usd=self._start.credits_usd, key_limit_usd=self._start.key_limit_usd)
        self.generations: dict[str, Generation] = {}
        self.attempts: Counter[str] = Counter()
        self.paid: Counter[str] = Counter()
        self.cache: OrderedDict[str, CachedReply] = OrderedDict()

    def reset(self) -> None:
        """Go back to the start. Requests in flight go on, and are billed to the fresh account."""
        self._clear()
        self.counters.reset()
        self._note({"reset": True})

    def take_attempt(self, sample_key: str) -> int:
        """Count one attempt of a sample; returns how many came before."""
        before = self.attempts[sample_key]
        self.attempts[sample_key] = before + 1
        self._note({"attempt": sample_key})
        return before

    def settle(self, generation: Generation) -> None:
        """Record a generation and charge it."""
        self._apply(generation)
        if self._path is not None:
            self._note({"generation": generation.to_json()})

    def _apply(self, generation: Generation) -> None:
        self.generations[generation.id] = generation
        self.account.bill(generation.cost_usd)
        if generation.cost_usd > 0:
            self.paid[generation.body_digest] += 1

    def set_account(self, *, credits_usd: Decimal | None = None, key_limit_usd: Decimal | None) -> None:
        """Change the balance or the key's limit; null credits leave the balance."""
        if credits_usd is not None:
            self.account.credits_usd = credits_usd
        self.account.key_limit_usd = key_limit_usd
        limit = None if key_limit_usd is None else str(key_limit_usd)
        self._note({"account": {"credits_usd": str(self.account.credits_usd), "key_limit_usd": limit}})

    def store_reply(self, key: str, reply: CachedReply) -> None:
        """Keep a reply for identical requests."""
        self.cache[key] = reply
        while len(self.cache) > CACHE_ENTRIES:
            self.cache.popitem(last=False)
        if self._path is not None:
            values = {field.name: getattr(reply, field.name) for field in fields(reply)}
            self._note({"reply": {"key": key, **values}})

    def cached_reply(self, key: str, now_s: float) -> CachedReply | None:
        """The reply kept under `key`, unless it expired."""
        reply = self.cache.get(key)
        return reply if reply is not None and reply.expires_s > now_s else None

    def drop_reply(self, key: str) -> None:
        """Forget a kept reply."""
        if self.cache.pop(key, None) is not None:
            self._note({"drop": key})

    def stats(self) -> Json:
        """Counters for `/_admin/stats`; money as a decimal string."""
        counters = self.counters
        return {
            "requests": counters.requests,
            "in_flight": counters.in_flight,
            "peak_in_flight": counters.peak_in_flight,
            "connections": counters.connections,
            "statuses": {str(code): count for code, count in sorted(counters.statuses.items())},
            "faults": dict(sorted(counters.faults.items())),
            "cache_hits": counters.cache_hits,
            "generations": len(self.generations),
            "billed_usd": f"{self.account.usage_usd:f}",
            "credits_usd": f"{self.account.credits_usd:f}",
            "paid_more_than_once": sum(count - 1 for count in self.paid.values() if count > 1),
        }

    def flush(self) -> None:
        """Append what changed since the last call to the file.

        The kernel keeps what is written even if this process is killed; surviving a power cut is no aim here.
        """
        if self._path is None or not self._pending:
            return
        lines = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in self._pending)
        self._pending.clear()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(lines)

    def _note(self, entry: Json) -> None:
        if self._path is not None:
            self._pending.append(entry)

    def _replay(self, path: Path) -> None:
        if not path.exists():
            return
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                self._replay_entry(cast("Json", json.loads(line)))
            except (ValueError, KeyError, TypeError) as exc:
                raise ConfigurationError(
                    f"state file {str(path)!r}, line {number} is not one of ours ({type(exc).__name__}: {exc}). "
                    "Delete the file to start afresh."
                ) from exc

    def _replay_entry(self, entry: Json) -> None:
        (kind, value), *_ = entry.items()
        match kind:
            case "generation":
                self._apply(Generation.from_json(value))
            case "attempt":
                self.attempts[value] += 1
            case "reply":
                key = value.pop("key")
                self.cache[key] = CachedReply(**value)
            case "drop":
                self.cache.pop(value, None)
            case "account":
                limit: str | None = value["key_limit_usd"]
                self.account.credits_usd = Decimal(value["credits_usd"])
                self.account.key_limit_usd = None if limit is None else Decimal(limit)
            case "reset":
                self._clear()
            case _:
                raise ValueError(f"unknown entry {kind!r}")


def topup(state: State, amount_usd: Decimal) -> None:
    """Add credits.

    Raises:
        ValueError: The amount is negative.
    """
    if amount_usd < ZERO:
        raise ValueError(f"usd must not be negative, got {amount_usd}")
    state.set_account(credits_usd=state.account.credits_usd + amount_usd, key_limit_usd=state.account.key_limit_usd)
