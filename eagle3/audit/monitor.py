"""The audit of a run whose answers are still being bought: the same evidence and rules, in the order of arrival."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from eagle3.audit.provider_rules import Evidence, evidence_of, origin
from eagle3.audit.sample_rules import audit_sample
from eagle3.audit.shift_rules import NEWEST, SHIFT_RULES
from eagle3.audit.subject import Subject, TokenRules
from eagle3.errors import AuditFailedError, TokenError
from eagle3.recipe import Recipe
from eagle3.records import AuditFinding, Completion, PromptRecord, Severity
from eagle3.tokens.probed import Settled
from eagle3.tokens.profiles import ProviderProfile, fit_profile
from eagle3.tokens.reconstruct import reconstruct, unrebuilt
from eagle3.tokens.rendering import PromptRenderer, open_renderer

Answered: TypeAlias = tuple[PromptRecord, Completion]
Key: TypeAlias = tuple[str, str]
"""(provider, model)"""

MAX_FIT_ANSWERS = 512
"""First answers of a provider from which its habits are learned, anew at each doubling; later ones are held against
what was learned."""
MAX_KEPT = 2048
"""Newest evidence kept of each provider."""
MAX_BATCH = 64
"""Answers of one provider looked at per batch: a habit shows in them as in all."""
MAX_SHOWN = 5


class AuditMonitor:
    """Looks at answers as they come. Keeps what it learned; not safe for several threads at once."""

    def __init__(self, recipe: Recipe, target: Path, settled: Settled | None = None) -> None:
        """Load the target's tokenizer and template.

        Args:
            recipe: Thresholds, mode, and what providers and models are allowed.
            target: Prepared directory of the target model.
            settled: Habits that are known beforehand, by provider and axis.

        Raises:
            TokenError: Grammar, tokenizer and template do not fit one another.
        """
        self._recipe = recipe
        self._settled: Settled = settled or {}
        self._renderer: PromptRenderer = open_renderer(recipe, target)
        self._rules = TokenRules(
            self._renderer.grammar,
            self._renderer.tokenizer,
            recipe.target.mode,
            recipe.prompts.special_literals == "keep",
        )
        self._first: defaultdict[Key, list[Answered]] = defaultdict(list)
        self._fitted_at: dict[Key, int] = {}
        self._refitted: set[str] = set()
        self._profiles: dict[Key, ProviderProfile] = {}
        self._evidence: defaultdict[str, deque[Evidence]] = defaultdict(lambda: deque(maxlen=MAX_KEPT))
        self._origins: dict[tuple[str, str, str | None], Evidence] = {}
        self.num_seen = 0

    def settle(self, settled: Settled) -> None:
        """Take over what probes settled, before the first answers come."""
        self._settled = settled

    def look(self, answers: Sequence[Answered]) -> None:
        """Take more answers and judge what is there now.

        Raises:
            AuditFailedError: A finding is critical: going on would buy more of the same.
        """
        by_key: defaultdict[Key, list[Answered]] = defaultdict(list)
        for prompt, completion in answers:
            by_key[completion.provider, completion.model].append((prompt, replace(completion, raw_body=b"")))
        findings: list[AuditFinding] = []
        for key, batch in by_key.items():
            findings += self._take(key, batch)
        self.num_seen += len(answers)
        for provider in sorted({provider for provider, _ in by_key}):
            findings += self._shifts(provider)
        findings += self._origin_findings()
        critical = [finding for finding in findings if finding.severity is Severity.CRITICAL]
        if critical:
            raise AuditFailedError(self._describe(critical))

    def _take(self, key: Key, batch: Sequence[Answered]) -> list[AuditFinding]:
        """Turn new answers of one provider into evidence; return what rules about single samples find."""
        first = self._first[key]
        room = MAX_FIT_ANSWERS - len(first)
        first += batch[:room]
        if len(first) >= 2 * self._fitted_at.get(key, 0) and room > 0:
            self._fit(key)
            # Deltas that an earlier, poorer profile gave are taken back.
            known = self._evidence[key[0]]
            old = [each for each in known if each.model != key[1]]
            known.clear()
            known.extend(old)
            looked_at = first
        else:
            looked_at = batch[-MAX_BATCH:]
        findings: list[AuditFinding] = []
        for prompt, completion in looked_at:
            subject = self._subject(key, prompt, completion)
            findings += audit_sample(subject)
            evidence = evidence_of(subject)
            self._evidence[key[0]].append(evidence)
            self._origins.setdefault((key[0], key[1], evidence.quantization), evidence)
        return findings

    def _shifts(self, provider: str) -> list[AuditFinding]:
        """Return what begins to go wrong, now or, when habits were learned anew, at any time since the first answer.

        Most answers decide what is learned. When they are those after a change, it is the earlier ones that do not fit.
        """
        evidence = tuple(self._evidence[provider])
        stops = [len(evidence)]
        if provider in self._refitted:
            self._refitted.discard(provider)
            stops += range(NEWEST[0], len(evidence), NEWEST[0])
        for stop in stops:
            found = [
                finding
                for rule in SHIFT_RULES.values()
                for finding in rule(provider, evidence[:stop], self._recipe.audit)
            ]
            if found:
                return found
        return []

    def _fit(self, key: Key) -> None:
        first = self._first[key]
        self._fitted_at[key] = len(first)
        self._refitted.add(key[0])
        self._profiles[key] = fit_profile(
            [completion for _, completion in first],
            self._renderer.grammar,
            self._renderer.tokenizer,
            self._renderer.mode,
            min_samples=self._recipe.reconstruction.min_profile_samples,
            settled=self._settled.get(key[0]),
        )

    def _subject(self, key: Key, prompt: PromptRecord, completion: Completion) -> Subject:
        renderer = self._renderer
        prompt_ids: Sequence[int] = ()
        try:
            prompt_ids = renderer.render_ids(prompt.messages, prompt.tools)
            sample = reconstruct(
                completion,
                prompt_ids,
                renderer.grammar,
                renderer.tokenizer,
                self._profiles[key],
                mode=renderer.mode,
                use_server_ids=self._recipe.reconstruction.use_server_ids,
                tools_declared=bool(prompt.tools),
            ).sample
        except TokenError as exc:
            sample = unrebuilt(completion, prompt_ids, str(exc)).sample
        return Subject(prompt=prompt, completion=completion, sample=sample, rules=self._rules)

    def _origin_findings(self) -> list[AuditFinding]:
        by_provider: defaultdict[str, list[Evidence]] = defaultdict(list)
        for evidence in self._origins.values():
            by_provider[evidence.provider].append(evidence)
        return list(origin(by_provider, self._recipe.generation.provider))

    def _describe(self, critical: Sequence[AuditFinding]) -> str:
        lines = [f"{each.rule}, {each.provider or 'the whole run'}: {each.detail}" for each in critical]
        more = f"\n  … and {len(lines) - MAX_SHOWN} more" if len(lines) > MAX_SHOWN else ""
        return (
            f"buying was stopped by the audit after {self.num_seen} answers:\n  "
            + "\n  ".join(lines[:MAX_SHOWN])
            + f"{more}\nEverything received is kept. Leave the provider out (generation.provider.routing.ignore), "
            "correct grammar or target, or set audit.stop_on_critical to false to buy on and drop what is wrong."
        )
