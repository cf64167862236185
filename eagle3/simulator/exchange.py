"""The life of one chat request after it was accepted: waiting, keep-alive, failing, billing, delivering.

The order that matters for money: an answer is billed, recorded and cached at the moment the model finishes, whatever
happens to its delivery. A client that left early is billed all the same unless it closed a stream of a provider that
cancels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eagle3.simulator import bodies
from eagle3.simulator.account import price
from eagle3.simulator.answers import Answer
from eagle3.simulator.habits import Outcome, render
from eagle3.simulator.request import ChatRequest
from eagle3.simulator.scenario import CONTENT_FAULTS, Fault, FaultKind, Provider, Scenario
from eagle3.simulator.state import CachedReply, Generation, State
from eagle3.simulator.wire import HTML_TYPE, JSON_TYPE, STREAM_TYPE, Clock, Reply

MAX_PADDINGS = 19
"""Most pieces of keep-alive whitespace seen before one recorded reply."""
STREAM_STEPS = 20
"""A stream is written in at most so many portions."""

_HTTP_ERRORS: Mapping[FaultKind, tuple[int, str, str]] = {
    FaultKind.HTTP_429: (429, "Provider returned error", "rate_limit_exceeded"),
    FaultKind.HTTP_500: (500, "Internal Server Error", "server"),
    FaultKind.HTTP_502: (502, "Provider returned an invalid or empty response", "provider_unavailable"),
    FaultKind.HTTP_503: (503, "Provider is temporarily unavailable", "temporarily_unavailable"),
    FaultKind.HTTP_504: (504, "The provider did not respond in time", "timeout"),
    FaultKind.HTTP_524: (524, "", ""),
    FaultKind.HTTP_529: (529, "Provider is overloaded", "provider_overloaded"),
}
_SLOW_ERRORS = frozenset({FaultKind.HTTP_504, FaultKind.HTTP_524})
"""Errors that come after the time of a whole answer; the others come after a tenth of it."""
_MUTE = frozenset({FaultKind.DROPPED, FaultKind.SILENCE})
_UNCACHED = frozenset({FaultKind.ERROR_IN_200, FaultKind.CHOICE_ERROR, FaultKind.BLANK, FaultKind.CONTENT_FILTER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An accepted chat request and everything that was decided about it."""

    generation_id: str
    request: ChatRequest
    provider: Provider
    answer: Answer
    fault: Fault | None
    attempt: int
    latency_s: float
    """Already scaled."""


class Exchange:
    """One accepted request on its way to a reply."""

    def __init__(
        self, order: Order, *, scenario: Scenario, state: State, in_flight: dict[str, int], clock: Clock, reply: Reply
    ) -> None:
        """Prepare; `in_flight` counts the requests at each endpoint and is shared by all exchanges."""
        self._order = order
        self._request = order.request
        self._scenario = scenario
        self._state = state
        self._in_flight = in_flight
        self._clock = clock
        self._reply = reply
        self._kind = order.fault.kind if order.fault is not None else None
        self._started_s = clock.now_s()
        self._outcome = render(order.answer, order.provider, self._kind)
        self._is_generated = order.fault is None or self._kind in CONTENT_FAULTS or order.fault.is_billed
        self._is_intact = self._kind not in CONTENT_FAULTS
        self._is_open = False
        self._is_over = False
        self._num_paddings = 0
        self._padding_s = scenario.padding_interval_s * scenario.time_scale
        self._events: list[bytes] = []
        self._num_events = 0
        self._num_written = 0

    def begin(self) -> None:
        """Start the clock; everything else happens in timers."""
        tag = self._order.provider.tag
        self._in_flight[tag] = self._in_flight.get(tag, 0) + 1
        if self._kind is not None:
            self._state.counters.faults[self._kind.value] += 1
        latency_s = self._order.latency_s
        if self._kind in _HTTP_ERRORS:
            self._clock.later(latency_s if self._kind in _SLOW_ERRORS else latency_s / 10, self._refuse)
        elif self._request.is_streamed and self._kind not in _MUTE:
            self._begin_stream()
        else:
            if self._kind not in _MUTE and latency_s > self._padding_s:
                self._padding_s = max(self._padding_s, latency_s / MAX_PADDINGS)
                self._clock.later(self._padding_s, self._pad)
            self._clock.later(latency_s, self._complete)

    def _open(self, content_type: str = JSON_TYPE) -> None:
        if not self._is_open:
            self._is_open = True
            self._state.counters.statuses[200] += 1
            self._reply.open(200, self._headers(), content_type)

    def _headers(self) -> dict[str, str]:
        headers = {"X-Generation-Id": self._order.generation_id}
        if self._request.cache_key is not None:
            headers["X-OpenRouter-Cache-Status"] = "MISS"
            headers["X-OpenRouter-Cache-TTL"] = str(self._request.cache_ttl_s)
        return headers

    def _pad(self) -> None:
        is_endless = self._kind is FaultKind.HANG
        if self._reply.is_lost or (self._is_over and not is_endless):
            return
        if self._num_paddings >= MAX_PADDINGS and not is_endless:
            return
        self._open()
        self._reply.write(bodies.COMMENT if self._request.is_streamed else bodies.PADDING)
        self._num_paddings += 1
        # A scale of zero must not turn an endless reply into a busy loop.
        self._clock.later(max(self._padding_s, 0.01) if is_endless else self._padding_s, self._pad)

    def _complete(self) -> None:
        self._settle(self._outcome)
        reply, kind = self._reply, self._kind
        if kind in (FaultKind.HANG, FaultKind.SILENCE):
            self._hold()
            if kind is FaultKind.HANG and not self._is_open:
                self._pad()
            return
        self._over()
        if kind is FaultKind.DROPPED:
            reply.cut()
            return
        self._open()
        if self._num_paddings == 0:
            reply.write(bodies.PADDING)
        if kind is FaultKind.PADDING_ONLY:
            reply.close()
            return
        body = self._body(self._outcome)
        if kind is FaultKind.ERROR_IN_200:
            body = bodies.error(
                502,
                "Provider returned error",
                error_type="provider_unavailable",
                provider=self._order.provider.name,
                raw='{"error":{"message":"upstream connection reset","type":"server_error"}}',
            )
        encoded = bodies.encode(body)
        if kind is FaultKind.CUT_BODY:
            reply.write(encoded[: len(encoded) // 2])
            reply.cut()
            return
        reply.write(encoded)
        reply.close()

    def _begin_stream(self) -> None:
        self._open(STREAM_TYPE)
        self._reply.write(bodies.COMMENT * 2)
        self._events = [bodies.event(chunk) for chunk in bodies.chunks_of(self._body(self._outcome))]
        self._num_events = len(self._events)
        if self._kind is FaultKind.CUT_BODY:
            del self._events[self._num_events // 2 :]
        elif self._kind in (FaultKind.PADDING_ONLY, FaultKind.HANG):
            self._events.clear()
        self._reply.on_lost = self._cancel_stream
        self._stream_step(1)

    def _stream_step(self, step: int) -> None:
        pause_s = self._order.latency_s / STREAM_STEPS

        def write() -> None:
            if self._is_over:
                return
            until = self._num_events * step // STREAM_STEPS
            for event in self._events[self._num_written : until]:
                self._reply.write(event)
            self._num_written = max(self._num_written, until)
            if step == STREAM_STEPS:
                self._end_stream()
            else:
                self._stream_step(step + 1)

        self._clock.later(pause_s, write)

    def _end_stream(self) -> None:
        self._settle(self._outcome)
        if self._kind is FaultKind.HANG:
            self._hold()
            self._pad()
            return
        self._over()
        if self._kind is FaultKind.CUT_BODY:
            self._reply.cut()
            return
        if self._kind is not FaultKind.PADDING_ONLY and self._outcome.error is None:
            self._reply.write(bodies.STREAM_END)
        self._reply.close()

    def _cancel_stream(self) -> None:
        if self._is_over or not self._order.provider.cancels_streams:
            return
        full = self._outcome
        tokens = full.completion_tokens * self._num_written // max(1, self._num_events)
        provider = self._order.provider
        # What is insured costs nothing, however far it came.
        usd = full.completion_usd and price(tokens, provider.completion_usd_per_mtok)
        partial = replace(full, completion_tokens=tokens, completion_usd=usd, finish_reason=None)
        self._settle(partial, is_cancelled=True)
        self._over()

    def _refuse(self) -> None:
        fault = self._order.fault
        assert fault is not None, "only a fault refuses"
        status, message, error_type = _HTTP_ERRORS[fault.kind]
        self._settle(self._outcome)
        self._over()
        headers = {"X-Generation-Id": self._order.generation_id}
        if fault.retry_after_s is not None and status in (429, 503):
            headers["Retry-After"] = str(fault.retry_after_s)
        self._state.counters.statuses[status] += 1
        if status == 524:
            self._reply.send(status, bodies.EDGE_TIMEOUT_PAGE, headers, HTML_TYPE)
            return
        name = self._order.provider.name
        raw = f"{self._request.model.id} is temporarily rate-limited upstream. Please retry shortly."
        body = bodies.error(
            status,
            message,
            error_type=error_type,
            provider=None if status == 500 else name,
            raw=raw if status == 429 else None,
        )
        self._reply.send(status, bodies.encode(body), headers)

    def _body(self, outcome: Outcome) -> dict[str, Any]:
        order = self._order
        wants_ids = self._request.fields.get("return_token_ids") is True
        is_shown = wants_ids and order.provider.returns_token_ids and self._is_intact
        return bodies.completion(
            outcome,
            generation_id=order.generation_id,
            created=int(self._started_s),
            model=self._request.model.permanent_id,
            provider=order.provider.name,
            token_ids=(order.answer.prompt_ids, order.answer.output_ids) if is_shown else None,
        )

    def _settle(self, outcome: Outcome, *, is_cancelled: bool = False) -> None:
        """Bill, record and cache what the model made; nothing if the fault kept the request from the model."""
        if not self._is_generated:
            return
        order, request, now_s = self._order, self._request, self._clock.now_s()
        self._state.settle(
            Generation(
                id=order.generation_id,
                created_s=self._started_s,
                ready_s=now_s + self._scenario.generation_lag_s * self._scenario.time_scale,
                model=self._request.model.permanent_id,
                provider=order.provider.name,
                messages_key=request.messages_key,
                body_digest=request.body_digest,
                attempt=order.attempt,
                prompt_tokens=outcome.prompt_tokens,
                completion_tokens=outcome.completion_tokens,
                reasoning_tokens=outcome.reasoning_tokens,
                cost_usd=outcome.cost_usd,
                finish_reason=outcome.finish_reason,
                output_ids=order.answer.output_ids if self._is_intact and not is_cancelled else (),
                fault=None if self._kind is None else self._kind.value,
                is_streamed=request.is_streamed,
                is_cancelled=is_cancelled,
                latency_s=now_s - self._started_s,
            )
        )
        if request.cache_key is not None and self._kind not in _UNCACHED and not is_cancelled:
            kept = CachedReply(
                body=self._body(outcome),
                generation_id=order.generation_id,
                stored_s=now_s,
                expires_s=now_s + request.cache_ttl_s,
            )
            self._state.store_reply(request.cache_key, kept)

    def _leave_provider(self) -> None:
        self._in_flight[self._order.provider.tag] -= 1

    def _over(self) -> None:
        self._is_over = True
        self._reply.on_lost = None
        self._leave_provider()
        self._state.counters.leave()

    def _hold(self) -> None:
        """The model is done and the reply never will be: in flight until the client gives up."""
        self._is_over = True
        self._leave_provider()
        if self._reply.is_lost:
            self._state.counters.leave()
        else:
            self._reply.on_lost = self._state.counters.leave
