"""Check P5: the chat template opens an answer as the grammar says, and writes finished ones as we lay them out."""

from collections.abc import Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path

from eagle3.preflight.checks import Recorder, require
from eagle3.recipe import Recipe
from eagle3.records import Completion, JsonObject, ToolCall, Usage
from eagle3.tokens.grammar import ResponseGrammar
from eagle3.tokens.layout import Habits, lay_out, shapes_of
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.tokenizer import Tokenizer

QUESTION = "What is 6 times 7?"
REASONING = "Six times seven\nis 42, I think."
CONTENT = "The answer is **42**.\n\nDone"
TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "First."}},
            "required": ["a"],
        },
    },
}
ARGUMENTS = '{"a": 7}'
ADVICE = "Check target.mode, target.template_options, the template and the grammar's modes and tools."

HISTORY_ADVICE = (
    "Templates write finished turns by rules of their own, so this alone stops nothing. Compare the grammar's modes "
    "and tools with the model's own answers; billed counts decide."
)


def check_template(
    recipe: Recipe, grammar: ResponseGrammar, tokenizer: Tokenizer, target: Path, recorder: Recorder
) -> None:
    """P5: the template opens answers as the grammar says, and writes finished ones as we lay them out."""
    renderer = _open_renderer(recipe, grammar, tokenizer, target, recorder)
    if renderer is None:
        return
    mode_reasoning = grammar.mode(recipe.target.mode).reasoning
    has_reasoning = mode_reasoning is not None
    cases: dict[str, Completion] = {}
    if mode_reasoning is None or not mode_reasoning.before:
        # A model that opens its reasoning itself may leave it out; templates then write it empty.
        cases["content"] = _answer(content=CONTENT)
    if has_reasoning:
        cases["reasoning and content"] = _answer(reasoning=REASONING, content=CONTENT)
    if grammar.tools is not None:
        reasoning = REASONING if has_reasoning else None
        cases["a tool call"] = _answer(reasoning=reasoning, num_calls=1)
        cases["content and two tool calls"] = _answer(reasoning=reasoning, content=CONTENT, num_calls=2)
    for name, answer in cases.items():
        with recorder.check("P5", f"template against grammar: {name}", HISTORY_ADVICE, is_binding=False) as note:
            note(_compare(renderer, answer))


def _open_renderer(
    recipe: Recipe, grammar: ResponseGrammar, tokenizer: Tokenizer, target: Path, recorder: Recorder
) -> PromptRenderer | None:
    with recorder.check("P5", "generation prompt", ADVICE) as note:
        renderer = PromptRenderer(target, grammar, tokenizer, recipe.target.mode, recipe.target.template_options)
        renderer.render_ids([{"role": "user", "content": QUESTION}])
        note(f"ends with {grammar.mode(recipe.target.mode).prompt_ends_with!r}")
        return renderer
    return None


def _compare(renderer: PromptRenderer, answer: Completion) -> str:
    """Return how the template writes a finished answer; fail when it is not how we lay it out."""
    question = [{"role": "user", "content": QUESTION}]
    tools = [TOOL] if answer.tool_calls else []
    prompt = renderer.render_ids(question, tools)
    written = renderer.render_history_ids([*question, _message(answer)], tools)
    forms = {"as we lay it out": answer}
    if answer.reasoning:
        forms["as we lay it out, without the reasoning of finished turns"] = _without_reasoning(answer)
    shown = ""
    for form, candidate in forms.items():
        ids = _layout(renderer, candidate)
        for start in _starts(renderer, prompt, candidate):
            expected = [*start, *ids]
            rest = written[len(expected) :]
            # Templates put a line break between turns, which the model does not write.
            if written[: len(expected)] == expected and not renderer.tokenizer.decode(rest).strip():
                return form
            shown = shown or _difference(renderer, written, expected)
    require(condition=False, problem=shown)
    return ""


def _starts(renderer: PromptRenderer, prompt: Sequence[int], answer: Completion) -> list[list[int]]:
    """Return what may stand before the answer's ids: the prompt, or the prompt whose opener of thinking is closed."""
    starts = [list(prompt)]
    mode = renderer.grammar.mode(renderer.mode)
    if mode.close is None and not answer.reasoning:
        # The template may write the turns of a mode without thinking as if there had been none to switch off.
        for other in renderer.grammar.modes.values():
            ending, shorter = mode.prompt_ends_with, other.prompt_ends_with
            if other is not mode and ending.startswith(shorter) and ending != shorter:
                cut = renderer.tokenizer.encode_ordinary(ending[len(shorter) :])
                starts.append(list(prompt[: -len(cut)]))
    return starts


def _layout(renderer: PromptRenderer, answer: Completion) -> list[int]:
    grammar, mode = renderer.grammar, renderer.mode
    shape = shapes_of(answer, grammar, mode)[0]
    # Templates write what the model wrote, so text that servers strip is put back.
    padding = "restored" if "restored" in grammar.variants.padding else grammar.variants.padding[0]
    pieces = lay_out(answer, grammar, mode, Habits(padding=padding), shape, renderer.tokenizer.encode_ordinary)
    return list(chain.from_iterable(piece.ids for piece in pieces))


def _difference(renderer: PromptRenderer, written: Sequence[int], expected: Sequence[int]) -> str:
    pairs = zip(written, expected, strict=False)
    place = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(written), len(expected)))
    decode = renderer.tokenizer.decode
    return (
        f"expected {decode(expected[place : place + 12])!r} (ids {list(expected[place : place + 4])}) at id {place}, "
        f"the template writes {decode(written[place : place + 12])!r} (ids {list(written[place : place + 4])})."
    )


def _answer(*, reasoning: str | None = None, content: str | None = None, num_calls: int = 0) -> Completion:
    calls = tuple(
        ToolCall(id=f"functions.add_numbers:{number}", name="add_numbers", arguments=ARGUMENTS)
        for number in range(num_calls)
    )
    return Completion(
        sample_id="preflight",
        dataset="preflight",
        reasoning=reasoning,
        content=content,
        tool_calls=calls,
        finish_reason="tool_calls" if calls else "stop",
        native_finish_reason=None,
        provider="",
        model="",
        quantization=None,
        generation_id=None,
        usage=Usage(prompt_tokens=0, completion_tokens=0),
        cost_usd=Decimal(0),
        cost_is_estimated=False,
        prompt_token_ids=None,
        completion_token_ids=None,
        latency_s=0.0,
        attempts=1,
        from_cache=False,
        raw_body=b"",
    )


def _without_reasoning(answer: Completion) -> Completion:
    return _answer(content=answer.content, num_calls=len(answer.tool_calls))


def _message(answer: Completion) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": answer.content or ""}
    if answer.reasoning:
        # Templates read either name.
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message
