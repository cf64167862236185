"""Checks P10 to P15: designed questions to every eligible endpoint, for at most a cent each."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol, cast

from eagle3.errors import PausedError, ProviderError, TokenError
from eagle3.preflight.settling import Probed, settled_axes, shortest_length, surviving
from eagle3.progress import Progress, ProgressEvent, no_progress
from eagle3.providers.base import ChatRequest, Endpoint
from eagle3.recipe import Recipe, Sampling
from eagle3.records import Completion, JsonObject
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.template_checks import TOOL

MAX_USD = Decimal("0.01")
"""Most that the probes of one endpoint cost."""
EXACT_TEXTS = ("42", "2024", "3.14", "7", "你好", "谢谢", "100 200", "0")
"""Texts that a model repeats faithfully. Those are asked for whose ids change when a space is put before them."""
NUM_EXACT = 4
ENGLISH = "Reply with exactly: {text}"
CHINESE = "只回复: {text}"
TOOL_NAME = "tool"
"""Name of the question that declares a tool."""
TOOL_QUESTION = "Call the tool add_numbers with a = 7. Do not say anything else."
LONG_QUESTION = "Count from 1 to 200 in words, one number per line."
CUT_TOKENS = 12
"""Limit of the answer that is cut in its middle, or in its reasoning."""
THINKING_TOKENS = 384
PLAIN_TOKENS = 24
TOOL_TOKENS = 96


class Asker(Protocol):
    """Who asks and pays; a generation session does."""

    @property
    def eligible(self) -> Sequence[Endpoint]:
        """The endpoints to probe."""
        ...

    def ask(self, name: str, request: ChatRequest, endpoint: Endpoint, extra: JsonObject) -> Completion:
        """Send one question and pay for it from the run's budget."""
        ...


@dataclass(slots=True, kw_only=True)
class EndpointProbes:
    """What one endpoint answered, and what follows."""

    endpoint: Endpoint
    provider: str
    """As its replies name it."""
    models: set[str] = field(default_factory=set[str])
    answered: list[Probed] = field(default_factory=list[Probed])
    prompt_counts: dict[str, tuple[int, int]] = field(default_factory=dict[str, "tuple[int, int]"])
    """Question -> (prompt ids rendered, billed)."""
    problems: list[str] = field(default_factory=list[str])
    spent_usd: Decimal = Decimal(0)
    settled: dict[str, list[str | bool]] = field(default_factory=dict[str, "list[str | bool]"])
    gives_ids: bool = False
    gives_logprobs: bool = False
    cut_lands_in: str | None = None
    """Where the text of an answer cut at once stands: `reasoning` or `content`."""

    def to_json(self) -> JsonObject:
        """Return everything for the run's files."""
        return {
            "tag": self.endpoint.tag,
            "provider": self.provider,
            "models": sorted(self.models),
            "quantization": self.endpoint.quantization,
            "spent_usd": f"{self.spent_usd:f}",
            "prompt_counts": {name: list(counts) for name, counts in self.prompt_counts.items()},
            "settled": self.settled,
            "gives_ids": self.gives_ids,
            "gives_logprobs": self.gives_logprobs,
            "cut_lands_in": self.cut_lands_in,
            "problems": self.problems,
            "answers": [_answer_json(each) for each in self.answered],
        }


def probe_all(
    asker: Asker, recipe: Recipe, renderer: PromptRenderer, progress: Progress = no_progress
) -> list[EndpointProbes]:
    """Probe every eligible endpoint, one question after the other.

    Args:
        asker: Asks and pays.
        recipe: Its mode, and what the model is allowed to think.
        renderer: Of the target.
        progress: Told about every endpoint.

    Raises:
        PausedError: The account or the budget cannot pay.
    """
    endpoints = asker.eligible
    found: list[EndpointProbes] = []
    for endpoint in endpoints:
        found.append(_Prober(asker, recipe, renderer, endpoint).run())
        progress(
            ProgressEvent(stage="preflight", label="probes", done=len(found), total=len(endpoints), unit="endpoints")
        )
    return found


def discriminating_texts(renderer: PromptRenderer) -> list[str]:
    """Return texts whose number of ids changes with a space before them, at most `NUM_EXACT`, both scripts first."""
    encode = renderer.tokenizer.encode_ordinary
    telling = [text for text in EXACT_TEXTS if len(encode(f" {text}")) != len(encode(text))]
    scripts = [next((text for text in telling if text.isascii() is ascii_only), None) for ascii_only in (True, False)]
    first = [text for text in scripts if text is not None]
    return [*first, *(text for text in telling if text not in first)][:NUM_EXACT] or list(EXACT_TEXTS[:2])


class _Prober:
    """Asks one endpoint everything."""

    def __init__(self, asker: Asker, recipe: Recipe, renderer: PromptRenderer, endpoint: Endpoint) -> None:
        self._asker = asker
        self._recipe = recipe
        self._renderer = renderer
        self._endpoint = endpoint
        self._result = EndpointProbes(endpoint=endpoint, provider=endpoint.provider)
        grammar = renderer.grammar
        self._is_thinking = grammar.mode(renderer.mode).close is not None
        self._reasoning = next(
            (dataset.sampling.reasoning for dataset in recipe.prompts.datasets if dataset.sampling.reasoning), None
        )

    def run(self) -> EndpointProbes:
        """Ask, and conclude."""
        result, renderer = self._result, self._renderer
        grammar, tokenizer, mode = renderer.grammar, renderer.tokenizer, renderer.mode
        limit = THINKING_TOKENS if self._is_thinking else PLAIN_TOKENS
        for number, text in enumerate(discriminating_texts(renderer)):
            form = ENGLISH if text.isascii() else CHINESE
            question = form.format(text=text)
            extra: JsonObject = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True} if not number else {}
            whole = self._ask(f"exactly {text}", question, limit, extra=extra)
            if whole is None and extra:
                whole = self._ask(f"exactly {text}", question, limit)
            if whole is None or whole.finish_reason not in grammar.end or number > 1:
                continue
            shortest = shortest_length(whole, grammar, tokenizer, mode)
            if shortest is not None:
                # Long enough for the shortest explanation, and one token shorter, which takes the end away.
                self._ask(f"cut {text}", question, shortest, repeats=f"exactly {text}")
                self._ask(f"without end {text}", question, shortest - 1, repeats=f"exactly {text}")
        self._ask("cut at once", LONG_QUESTION, CUT_TOKENS)
        supported = self._endpoint.supported_parameters
        if grammar.tools is not None and (not supported or "tools" in supported):
            self._ask(TOOL_NAME, TOOL_QUESTION, limit + TOOL_TOKENS, tools=[TOOL])
        left = surviving(result.answered, grammar, tokenizer, mode)
        result.settled = settled_axes(left, grammar, mode)
        if result.answered and not left:
            result.problems.append("no combination of habits explains all answers: the axes stay open")
        self._look_at_capabilities()
        return result

    def _ask(
        self,
        name: str,
        question: str,
        max_tokens: int,
        *,
        tools: Sequence[JsonObject] = (),
        extra: JsonObject | None = None,
        repeats: str | None = None,
    ) -> Completion | None:
        """Ask once; what goes wrong is noted and tells the caller nothing."""
        result, endpoint = self._result, self._endpoint
        messages = [{"role": "user", "content": question}]
        request = ChatRequest(
            messages=messages,
            tools=tools,
            sampling=Sampling(temperature=0.0, max_tokens=max(1, max_tokens), reasoning=self._reasoning),
            replica=0,
            template_options=self._recipe.target.template_options,
        )
        try:
            num_prompt = len(self._renderer.render_ids(messages, tools))
            worst_usd = (
                2 * num_prompt * endpoint.prompt_usd + max_tokens * endpoint.completion_usd + endpoint.request_usd
            )
            if result.spent_usd + worst_usd > MAX_USD:
                result.problems.append(f"{name}: not asked, it might cost more than the {MAX_USD} USD of an endpoint")
                return None
            answer = self._asker.ask(f"probe:{endpoint.tag}:{name}", request, endpoint, extra or {})
        except PausedError:
            raise
        except (ProviderError, TokenError) as exc:
            result.problems.append(f"{name}: {exc}")
            return None
        result.spent_usd += answer.cost_usd
        result.provider = answer.provider
        result.models.add(answer.model)
        if answer.usage.prompt_tokens > 0:
            result.prompt_counts[name] = (num_prompt, answer.usage.prompt_tokens)
        result.answered.append(Probed(name=name, max_tokens=max_tokens, completion=answer, repeats=repeats))
        return answer

    def _look_at_capabilities(self) -> None:
        result = self._result
        for each in result.answered:
            result.gives_ids = result.gives_ids or bool(each.completion.completion_token_ids)
            result.gives_logprobs = result.gives_logprobs or _has_logprobs(each.completion.raw_body)
            if each.name == "cut at once" and each.completion.finish_reason not in self._renderer.grammar.end:
                result.cut_lands_in = "reasoning" if each.completion.reasoning else "content"


def _has_logprobs(raw_body: bytes) -> bool:
    try:
        document: Any = json.loads(raw_body)
        return bool(document["choices"][0].get("logprobs"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return False


def _answer_json(probed: Probed) -> JsonObject:
    completion = probed.completion
    return {
        "question": probed.name,
        "max_tokens": probed.max_tokens,
        "reasoning": completion.reasoning,
        "content": completion.content,
        "tool_calls": [
            {"id": call.id, "name": call.name, "arguments": call.arguments} for call in completion.tool_calls
        ],
        "finish_reason": completion.finish_reason,
        "completion_tokens": completion.usage.completion_tokens,
        "reasoning_tokens": completion.usage.reasoning_tokens,
        "cost_usd": f"{completion.cost_usd:f}",
        "generation_id": completion.generation_id,
        "token_ids": cast(
            "list[int] | None", completion.completion_token_ids and list(completion.completion_token_ids)
        ),
    }
