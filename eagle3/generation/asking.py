"""Single questions beside the datasets, such as probes: through the same journal, ledger and budget, one at a time."""

import hashlib
import json
import time
from dataclasses import dataclass

from eagle3.errors import ProviderError
from eagle3.generation.doubts import Doubts
from eagle3.generation.endings import budget_reached, reason_to_halt
from eagle3.generation.history import ACCOUNT, History
from eagle3.generation.journal import Journal
from eagle3.generation.ledger import Ledger
from eagle3.generation.requests import deadline_s
from eagle3.generation.settlement import Settlement
from eagle3.generation.shards import prompt_token_bound
from eagle3.providers.base import ChatProvider, ChatRequest, Endpoint, PriceCap
from eagle3.providers.classify import Verdict, classify
from eagle3.recipe import Generation
from eagle3.records import Completion, JsonObject, PromptRecord

QUESTIONS = "questions"
"""`dataset` of completions that belong to none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request to one endpoint."""

    name: str
    """Names its journal entries; asking again under the same name is another request of it."""
    request: ChatRequest
    endpoint: Endpoint
    extra: JsonObject
    """Further fields of the body."""

    @property
    def cap(self) -> PriceCap:
        """The endpoint's own prices."""
        endpoint = self.endpoint
        return PriceCap(
            prompt_usd=endpoint.prompt_usd,
            completion_usd=endpoint.completion_usd,
            request_usd=endpoint.request_usd,
        )

    @property
    def prompt_token_bound(self) -> int:
        """The most prompt tokens it can be billed."""
        request = self.request
        prompt = PromptRecord(
            sample_id=self.name,
            dataset=QUESTIONS,
            prompt_id=self.name,
            messages=request.messages,
            tools=request.tools,
        )
        return prompt_token_bound(prompt)


class Asker:
    """Sends single questions. Lives on the session's event loop."""

    def __init__(
        self,
        provider: ChatProvider,
        journal: Journal,
        history: History,
        ledger: Ledger,
        settings: Generation,
    ) -> None:
        """Work on the given books by the recipe's section."""
        self._provider = provider
        self._journal = journal
        self._history = history
        self._ledger = ledger
        self._settlement = Settlement(provider, journal, history, ledger, Doubts(provider, journal, history, ledger))
        self._settings = settings

    async def ask(self, question: Question) -> Completion:
        """Send one question and pay for it; the reply is never taken out of the response cache.

        Raises:
            BudgetReachedError: The budget cannot carry it; nothing was sent.
            PausedError: The account cannot pay.
            ProviderError: There is no usable answer; what it cost is booked.
        """
        request, cap = question.request, question.cap
        number = self._history.sample(question.name).last_number + 1
        key = (question.name, number)
        amount_usd = cap.worst_usd(question.prompt_token_bound, request.sampling.max_tokens)
        if not self._ledger.reserve(key, amount_usd):
            raise budget_reached(self._ledger, amount_usd)
        routing = self._provider.routing([question.endpoint.tag], cap, [])
        body = self._provider.build_body(request, routing)
        if question.extra:
            fields: JsonObject = {**json.loads(body), **question.extra}
            body = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        intent: JsonObject = {
            "kind": "intent",
            "id": question.name,
            "attempt": number,
            "sha256": hashlib.sha256(body).hexdigest(),
            "reserved_usd": f"{amount_usd:f}",
            "routing": "",
            "time": round(time.time(), 3),
        }
        await self._journal.append(ACCOUNT, intent)
        self._history.apply(ACCOUNT, intent)
        reply = await self._provider.complete(
            body, deadline_s=deadline_s(self._settings, request.sampling.max_tokens), refresh=True
        )
        outcome = classify(reply)
        await self._settlement.attempt(ACCOUNT, key, reply, outcome, cap)
        halting = reason_to_halt(outcome, self._ledger.spent_usd)
        if halting is not None and outcome.verdict is not Verdict.RUN_REJECTED:
            raise halting
        answer = outcome.parsed.answer if outcome.parsed is not None else None
        if answer is None or answer.usage is None or answer.finish_reason is None:
            raise ProviderError(
                f"{question.endpoint.tag!r} gave no usable answer to {question.name!r}: {outcome.message}"
            )
        named = outcome.provider if self._provider.names_providers else None
        return Completion(
            sample_id=question.name,
            dataset=QUESTIONS,
            reasoning=answer.reasoning,
            content=answer.content,
            tool_calls=answer.tool_calls,
            finish_reason=answer.finish_reason,
            native_finish_reason=answer.native_finish_reason,
            provider=named or self._provider.name,
            model=answer.model or "",
            quantization=question.endpoint.quantization,
            generation_id=outcome.generation_id,
            usage=answer.usage,
            cost_usd=answer.cost_usd if answer.cost_usd is not None else amount_usd,
            cost_is_estimated=answer.cost_usd is None,
            prompt_token_ids=answer.prompt_token_ids,
            completion_token_ids=answer.completion_token_ids,
            latency_s=reply.elapsed_s,
            attempts=1,
            from_cache=reply.is_cache_hit,
            raw_body=reply.body,
        )
