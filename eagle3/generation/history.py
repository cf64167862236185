"""What the journal says, folded: the state of every sample and the money. Replay and the running engine share this.

Entries have a `kind`:

    intent      a request is about to be sent: id, attempt, sha256 of the body, reserved_usd, routing, time
    accepted    requests whose generation has begun: its id, for each
    renewed     the same request is sent only now, after refusals by rate limit: time
    answer      it brought the sample's answer: cost, usage, provider, latency, raw reply; ends the sample
    attempt     it brought none: verdict, billing (free, charged, held), message
    resolve     the provider said later what a request in doubt was charged
    reopened    failures of the named classes, in this dataset, are tried again
    failed      the sample ended without an answer
    routing     names a routing object, so that a later process can build the same bytes
    baseline    the account's usage when this run began to use a key
    reconciled  the account was compared with: charged_usd beyond what we knew, and the holds that it ended
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from eagle3.generation.journal_lines import Place, journal_paths, read_journal
from eagle3.generation.ledger import Ledger, RequestKey
from eagle3.records import FailedCompletion, FailureClass, JsonObject

ACCOUNT = ""
"""Journal folder of entries about the whole run."""

REOPENED = frozenset(
    {FailureClass.RETRIES_EXHAUSTED, FailureClass.AMBIGUOUS, FailureClass.EMPTY, FailureClass.MALFORMED}
)
"""Failures that may pass when a person starts the run again."""


@dataclass(slots=True)
class SampleHistory:
    """What happened to one sample so far."""

    attempts: int = 0
    """Requests that reached, or may have reached, the provider; refusals by rate limit are not counted."""
    tries: int = 0
    """Requests that ended without an answer. One that a crash of ours cut off is no try of the provider's."""
    last_number: int = 0
    """Number of the last intent, so that request keys never repeat."""
    bad_answers: int = 0
    answer: Place | None = None
    failure: FailedCompletion | None = None
    open_intents: dict[int, JsonObject] = field(default_factory=dict[int, JsonObject])
    """Requests without an outcome, or whose outcome is in doubt, by number."""
    asked_as: tuple[str, str] | None = None
    """Routing id and body digest of the last intent while its answer may be paid for: a response cache knows requests
    by their bytes. None otherwise, so that a changed routing takes effect."""
    needs_refresh: bool = False
    """The last reply was worthless, and the response cache would give it again."""
    was_lost: bool = False
    """A reply was paid for and did not arrive."""

    @property
    def intent(self) -> JsonObject | None:
        """The newest request whose fate is unknown."""
        return self.open_intents[max(self.open_intents)] if self.open_intents else None

    @property
    def is_final(self) -> bool:
        """Whether nothing more will be asked for this sample."""
        return self.answer is not None or self.failure is not None

    def forget_bytes_unless_paid(self) -> None:
        """Let the next request differ when no answer to an earlier one can be in the cache."""
        if not self.open_intents and not self.was_lost:
            self.asked_as = None


@dataclass(slots=True)
class Tally:
    """Running sums of one provider or one dataset."""

    samples: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    waited_s: float = 0.0
    """Sum of the latencies of `timed` answers; cached and imported ones say nothing about lengths."""
    timed: int = 0
    slowest_s: float = 0.0

    def waited(self, latency_s: float) -> None:
        """Count the latency of an answer; 0 when it says nothing."""
        self.timed += latency_s > 0
        self.waited_s += latency_s
        self.slowest_s = max(self.slowest_s, latency_s)

    def as_json(self) -> JsonObject:
        """Return the sums with money as text."""
        return {
            "samples": self.samples,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost_usd": f"{self.cost_usd:f}",
        }


@dataclass(slots=True)
class History:
    """The folded journal."""

    samples: dict[str, SampleHistory] = field(default_factory=dict[str, SampleHistory])
    by_provider: dict[str, Tally] = field(default_factory=dict[str, Tally])
    by_dataset: dict[str, Tally] = field(default_factory=dict[str, Tally])
    routings: dict[str, JsonObject] = field(default_factory=dict[str, JsonObject])
    baselines: list[JsonObject] = field(default_factory=list[JsonObject])
    verdicts: Counter[str] = field(default_factory=Counter[str])
    unexplained_usd: Decimal = Decimal(0)
    slowest_s: float = 0.0
    """Longest wait for an answer so far; 0 without any."""
    last_time_s: float = 0.0
    """Unix time of the newest intent."""
    paid_twice: int = 0
    """Answers bought again although an earlier, lost one was charged."""
    doubtful: dict[str, str] = field(default_factory=dict[str, str])
    """Dataset by sample id, of the requests whose fate was unknown when the journal was read."""

    def sample(self, sample_id: str) -> SampleHistory:
        """Return the state of a sample, a fresh one when it was never asked."""
        found = self.samples.get(sample_id)
        if found is None:
            found = self.samples[sample_id] = SampleHistory()
        return found

    def apply(self, dataset: str, entry: JsonObject, place: Place | None = None) -> None:
        """Fold one entry."""
        kind: str = entry["kind"]
        if kind == "routing":
            self.routings[entry["routing"]] = entry["object"]
        elif kind == "baseline":
            self.baselines.append(entry)
        elif kind == "reconciled":
            self.unexplained_usd += Decimal(entry["charged_usd"])
        elif kind == "accepted":
            for sample_id, number, generation_id in entry["requests"]:
                intent = self.sample(sample_id).open_intents.get(number)
                if intent is not None:
                    intent["generation_id"] = generation_id
        elif kind == "reopened":
            self.reopen_failures(frozenset(map(FailureClass, entry["classes"])), dataset)
        else:
            self._apply_to_sample(dataset, self.sample(entry["id"]), entry, place)

    def reopen_failures(self, classes: Collection[FailureClass] = REOPENED, dataset: str | None = None) -> int:
        """Forget failures of the given classes, by default those that another try may cure; return how many."""
        count = 0
        for sample in self.samples.values():
            failure = sample.failure
            if failure is None or dataset not in (None, failure.dataset):
                continue
            if failure.failure in classes:
                sample.failure = None
                sample.attempts = sample.tries = sample.bad_answers = 0
                self.by_dataset[failure.dataset].failed -= 1
                count += 1
        return count

    def tally(self, dataset: str) -> Tally:
        """Return the sums of a dataset."""
        return self.by_dataset.setdefault(dataset, Tally())

    def _apply_to_sample(self, dataset: str, sample: SampleHistory, entry: JsonObject, place: Place | None) -> None:
        kind: str = entry["kind"]
        if kind == "intent":
            sample.attempts += 1
            sample.last_number = entry["attempt"]
            sample.open_intents[entry["attempt"]] = entry
            sample.asked_as = (entry["routing"], entry["sha256"])
            sample.needs_refresh = False
            self.last_time_s = max(self.last_time_s, entry["time"])
        elif kind == "renewed":
            sample.open_intents[entry["attempt"]]["time"] = entry["time"]
            self.last_time_s = max(self.last_time_s, entry["time"])
        elif kind == "attempt":
            if dataset != ACCOUNT:  # entries there are questions of our own, not samples
                self.verdicts[entry["verdict"]] += 1
            if entry["counts"]:
                sample.tries += 1
            else:
                sample.attempts -= 1
            if entry["billing"] != "held":
                sample.open_intents.pop(entry["attempt"], None)
            if entry["verdict"] == "bad_answer":
                sample.bad_answers += 1
                sample.needs_refresh = True
            sample.was_lost = sample.was_lost or bool(entry.get("lost"))
            sample.forget_bytes_unless_paid()
            self._charge(dataset, entry.get("provider"), Decimal(entry.get("charged_usd", "0")))
        elif kind == "resolve":
            sample.open_intents.pop(entry["attempt"], None)
            charged_usd = Decimal(entry["charged_usd"])
            sample.was_lost = sample.was_lost or charged_usd > 0
            sample.forget_bytes_unless_paid()
            self._charge(dataset, entry.get("provider"), charged_usd)
        elif kind == "answer":
            if sample.failure is not None:  # reopened by a later process
                self.tally(dataset).failed -= 1
            sample.answer, sample.failure, sample.asked_as = place, None, None
            sample.open_intents.clear()
            usage = entry["usage"]
            latency_s = 0.0 if entry["from_cache"] else entry["latency_s"]
            for tally in (self.tally(dataset), self.by_provider.setdefault(entry["provider"], Tally())):
                tally.samples += 1
                tally.prompt_tokens += usage["prompt_tokens"]
                tally.completion_tokens += usage["completion_tokens"]
                tally.waited(latency_s)
            charged_usd = Decimal(entry["charged_usd"])
            self._charge(dataset, entry["provider"], charged_usd)
            if not entry["from_cache"]:
                self.slowest_s = max(self.slowest_s, entry["latency_s"])
                self.paid_twice += sample.was_lost and charged_usd > 0
        elif kind == "failed":
            self.tally(dataset).failed += sample.failure is None
            sample.failure = FailedCompletion(
                sample_id=entry["id"],
                dataset=dataset,
                failure=FailureClass(entry["failure"]),
                message=entry["message"],
                attempts=entry["attempts"],
            )
            sample.asked_as = None
            sample.open_intents.clear()

    def _charge(self, dataset: str, provider: Any, charged_usd: Decimal) -> None:
        if charged_usd:
            self.tally(dataset).cost_usd += charged_usd
            self.by_provider.setdefault(str(provider or "unknown"), Tally()).cost_usd += charged_usd


@dataclass(slots=True)
class _Open:
    """A request without an outcome."""

    dataset: str
    amount_usd: Decimal
    generation_id: str | None = None


class Replay:
    """Rebuilds history and ledger from entries in journal order."""

    def __init__(self, budget_usd: Decimal) -> None:
        """Start empty."""
        self.history = History()
        self.ledger = Ledger(budget_usd)
        self._open: dict[RequestKey, _Open] = {}
        self._ended: set[RequestKey] = set()

    def feed(self, dataset: str, entries: Iterable[tuple[Place | None, JsonObject]]) -> None:
        """Fold the entries of one journal."""
        for place, entry in entries:
            self.history.apply(dataset, entry, place)
            self._account(dataset, entry)

    def finish(self) -> tuple[History, Ledger]:
        """Return the result; requests without an outcome become holds."""
        for key, request in self._open.items():
            if key not in self._ended:
                self.ledger.restore_hold(key, request.amount_usd, request.generation_id)
                self.history.doubtful[key[0]] = request.dataset
        self._open.clear()
        return self.history, self.ledger

    def _account(self, dataset: str, entry: JsonObject) -> None:
        kind: str = entry["kind"]
        if kind == "reconciled":
            charged_usd = Decimal(entry["charged_usd"])
            self.ledger.charge(charged_usd)
            self.ledger.unexplained_usd += charged_usd
            self._ended.update((sample_id, number) for sample_id, number in entry["ended_holds"])
            return
        if kind == "accepted":
            for sample_id, number, generation_id in entry["requests"]:
                if (sample_id, number) in self._open:
                    self._open[sample_id, number].generation_id = generation_id
            return
        if kind not in ("intent", "answer", "attempt", "resolve"):
            return
        key: RequestKey = (entry["id"], entry["attempt"])
        if kind == "intent":
            self._open[key] = _Open(dataset, Decimal(entry["reserved_usd"]))
            return
        if kind == "attempt" and entry["billing"] == "held":
            self._open[key].generation_id = entry.get("generation_id") or self._open[key].generation_id
            return
        self._open.pop(key, None)
        for number in entry.get("resolves", ()):
            self._open.pop((entry["id"], number), None)
        charged_usd = Decimal(entry.get("charged_usd", "0"))
        self.ledger.spent_usd += charged_usd  # the journal names what was added, so no generation can count twice
        for generation_id in entry.get("paid_ids", ()):
            self.ledger.charge(Decimal(0), generation_id)


def replay(stage_path: Path, datasets: Iterable[str], budget_usd: Decimal) -> tuple[History, Ledger]:
    """Read all journals of a stage.

    Raises:
        ArtifactError: A journal is damaged before its last line.
    """
    work = Replay(budget_usd)
    for dataset in (ACCOUNT, *datasets):
        for path in journal_paths(stage_path / dataset):
            work.feed(dataset, read_journal(path))
    return work.finish()
