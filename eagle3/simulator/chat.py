"""`POST /chat/completions`: decide everything about a request, then hand it to an `Exchange`.

The order of the checks is the order in which the service answers: the body, the model, the response cache, routing,
the account, the answer, the provider's capacity, and only then the faults of the scenario.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from eagle3.simulator import bodies
from eagle3.simulator.account import ZERO
from eagle3.simulator.answers import Answer, Answers, AnswerTooLongError
from eagle3.simulator.capacity import Capacities
from eagle3.simulator.exchange import Exchange, Order
from eagle3.simulator.faults import choose_fault, latency_s
from eagle3.simulator.request import ChatRequest, RefusedError, parse_request, refused
from eagle3.simulator.routing import MalformedRoutingError, route
from eagle3.simulator.scenario import Provider, Scenario
from eagle3.simulator.state import CachedReply, Generation, State
from eagle3.simulator.wire import STREAM_TYPE, Clock, Reply


class LiveModel(Protocol):
    """A real model that answers prompts nobody recorded."""

    def submit(self, request: Mapping[str, Any], max_tokens: int, done: Callable[[Answer | str], None]) -> None:
        """Generate; then call `done`, in the event loop's thread, with the answer or the text of an error."""
        ...


class ChatService:
    """Accepts chat requests."""

    def __init__(
        self, scenario: Scenario, *, answers: Answers, state: State, clock: Clock, live: LiveModel | None = None
    ) -> None:
        """Serve `scenario` from `answers`; prompts not among them go to `live`, or are refused without one."""
        self._scenario = scenario
        self._answers = answers
        self._state = state
        self._clock = clock
        self._live = live
        self._in_flight: dict[str, int] = {}
        self._capacities = Capacities(scenario.time_scale, self._in_flight)
        self._num_accepted: dict[str, int] = {}

    def handle(self, key: str, headers: Mapping[str, str], body: bytes, reply: Reply) -> None:
        """Answer one authenticated request; the reply may come later.

        Args:
            key: The API key.
            headers: Of the request, names in lower case.
            body: As received; its bytes are part of the cache key and of the routing draw.
            reply: Where the answer goes.
        """
        self._state.counters.enter()
        generation_id = f"gen-{int(self._clock.now_s())}-{secrets.token_hex(10)}"
        try:
            self._accept(generation_id, parse_request(self._scenario, key, headers, body), reply)
        except RefusedError as exc:
            self._refuse(exc, generation_id, reply)

    def _refuse(self, refusal: RefusedError, generation_id: str, reply: Reply) -> None:
        if refusal.after_s > 0:
            self._clock.later(refusal.after_s, lambda: self._send_refusal(refusal, generation_id, reply))
        else:
            self._send_refusal(refusal, generation_id, reply)

    def _send_refusal(self, refusal: RefusedError, generation_id: str, reply: Reply) -> None:
        self._state.counters.statuses[refusal.status] += 1
        self._state.counters.leave()
        reply.send(refusal.status, bodies.encode(refusal.body), {"X-Generation-Id": generation_id})

    def _accept(self, generation_id: str, request: ChatRequest, reply: Reply) -> None:
        kept = self._kept_reply(request)
        if kept is not None:
            self._repeat(kept, generation_id, request, reply)
            return
        providers = self._route(request)
        self._check_account(request, providers[0])
        limit = request.max_tokens or providers[0].max_completion_tokens
        answer = self._recorded(request, limit)
        if answer is not None:
            self._begin(generation_id, request, providers, answer, reply)
        elif self._live is not None:

            def done(made: Answer | str) -> None:
                try:
                    if isinstance(made, str):
                        raise refused(400, made, "invalid_prompt")
                    self._begin(generation_id, request, providers, made, reply)
                except RefusedError as exc:
                    self._refuse(exc, generation_id, reply)

            self._live.submit(request.fields, limit or request.model.default_max_tokens, done)
        else:
            raise refused(
                400,
                f"Simulator: no recorded answer for these messages (sha256 {request.messages_key[:16]}…, "
                f"{len(self._answers)} answers are loaded). Record them, or start the simulator with --live.",
                "invalid_prompt",
            )

    def _route(self, request: ChatRequest) -> tuple[Provider, ...]:
        endpoints = self._scenario.endpoints(request.model)
        try:
            routed = route(request.fields, endpoints, seed=self._scenario.seed, body_digest=request.body_digest)
        except MalformedRoutingError as exc:
            raise refused(400, f"Invalid request: {exc}", "invalid_request") from exc
        if routed.refusal is not None:
            raise refused(
                404,
                routed.refusal,
                "not_found",
                code="no_endpoints" if routed.constraint == "no_endpoints" else "constraint_filtered",
                retryable=False,
                requested_models=[request.model.id],
                constraint=routed.constraint,
            )
        return routed.providers

    def _check_account(self, request: ChatRequest, provider: Provider) -> None:
        refusal = self._state.account.refuse(
            max_tokens=request.max_tokens or provider.max_completion_tokens or request.model.default_max_tokens,
            completion_usd_per_mtok=provider.completion_usd_per_mtok,
        )
        if refusal is not None:
            error_type = "payment_required" if refusal.status == 402 else "permission_denied"
            raise refused(refusal.status, refusal.message, error_type)

    def _recorded(self, request: ChatRequest, limit: int | None) -> Answer | None:
        try:
            found = self._answers.find(request.messages_key, max_tokens=limit, replica=request.replica)
            return found if found is not None else self._answers.improvised(request.fields, limit)
        except AnswerTooLongError as exc:
            raise refused(400, f"Simulator: {exc}", "invalid_request") from exc

    def _begin(
        self,
        generation_id: str,
        request: ChatRequest,
        providers: tuple[Provider, ...],
        answer: Answer,
        reply: Reply,
    ) -> None:
        scenario = self._scenario
        provider = self._with_capacity(request, providers)
        self._check_context(request, provider, answer)
        num_accepted = self._num_accepted.get(provider.tag, 0)
        self._num_accepted[provider.tag] = num_accepted + 1
        suffix = provider.model_suffix(num_accepted)
        if suffix is not None:
            request = replace(request, model=request.model.model_copy(update={"suffix": suffix}))
        provider = provider.after(num_accepted)
        attempt = self._state.take_attempt(request.sample_key)
        seconds = latency_s(
            provider.latency,
            seed=scenario.seed,
            sample_key=request.sample_key,
            attempt=attempt,
            tokens=len(answer.output_ids),
        )
        order = Order(
            generation_id=generation_id,
            request=request,
            provider=provider,
            answer=answer,
            fault=choose_fault(scenario, sample_key=request.sample_key, provider=provider, attempt=attempt),
            attempt=attempt,
            latency_s=seconds * scenario.time_scale,
        )
        Exchange(
            order,
            scenario=scenario,
            state=self._state,
            in_flight=self._in_flight,
            clock=self._clock,
            reply=reply,
        ).begin()

    @staticmethod
    def _check_context(request: ChatRequest, provider: Provider, answer: Answer) -> None:
        prompt, output = len(answer.prompt_ids), request.max_tokens or 0
        if prompt + output > provider.context_length:
            raise refused(
                400,
                f"This endpoint's maximum context length is {provider.context_length} tokens. However, you requested "
                f"about {prompt + output} tokens ({prompt} of text input, {output} in the output). Please reduce the "
                "length of either one.",
                "context_length_exceeded",
            )

    def _with_capacity(self, request: ChatRequest, providers: tuple[Provider, ...]) -> Provider:
        preferences: Any = request.fields.get("provider") or {}
        candidates = providers if preferences.get("allow_fallbacks", True) else providers[:1]
        now_s = self._clock.now_s()
        for provider in candidates:
            if self._capacities.admits(provider, now_s):
                return provider
        raise refused(
            429,
            "Provider returned error",
            "rate_limit_exceeded",
            after_s=max(provider.refusal_s for provider in candidates) * self._scenario.time_scale,
            code="capacity_exhausted",
            retryable=True,
            affected_providers=[provider.name for provider in candidates],
        )

    def _kept_reply(self, request: ChatRequest) -> CachedReply | None:
        if request.cache_key is None:
            return None
        if request.clears_cache:
            self._state.drop_reply(request.cache_key)
            return None
        return self._state.cached_reply(request.cache_key, self._clock.now_s())

    def _repeat(self, kept: CachedReply, generation_id: str, request: ChatRequest, reply: Reply) -> None:
        """Send a kept reply: the same text under a new generation id, no usage, no charge."""
        now_s = self._clock.now_s()
        counters = self._state.counters
        counters.cache_hits += 1
        counters.statuses[200] += 1
        counters.leave()
        body: dict[str, Any] = {**kept.body, "id": generation_id, "usage": bodies.zero_usage()}
        source = self._state.generations.get(kept.generation_id)
        self._state.settle(
            Generation(
                id=generation_id,
                created_s=now_s,
                ready_s=now_s + self._scenario.generation_lag_s * self._scenario.time_scale,
                model=body["model"],
                provider=body["provider"],
                messages_key=request.messages_key,
                body_digest=request.body_digest,
                attempt=self._state.attempts[request.sample_key],
                prompt_tokens=0,
                completion_tokens=0,
                reasoning_tokens=0,
                cost_usd=ZERO,
                finish_reason=body["choices"][0]["finish_reason"],
                output_ids=source.output_ids if source is not None else (),
                is_streamed=request.is_streamed,
                cache_source_id=kept.generation_id,
            )
        )
        headers = {
            "X-Generation-Id": generation_id,
            "X-OpenRouter-Cache-Status": "HIT",
            "X-OpenRouter-Cache-Age": str(int(now_s - kept.stored_s)),
            "X-OpenRouter-Cache-TTL": str(int(kept.expires_s - kept.stored_s)),
            "X-OpenRouter-Cache-Source-Id": kept.generation_id,
        }
        if not request.is_streamed:
            reply.send(200, bodies.PADDING + bodies.encode(body), headers)
            return
        reply.open(200, headers, STREAM_TYPE)
        for chunk in bodies.chunks_of(body):
            reply.write(bodies.event(chunk))
        reply.write(bodies.STREAM_END)
        reply.close()
