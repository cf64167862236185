"""Checks of the chat template, P5 and P7.

It opens an answer as the grammar says, writes finished ones as we lay them out, and keeps control literals ordinary.
"""

from collections.abc import Sequence
from decimal import Decimal
from itertools import chain

from eagle3.records import Completion, JsonObject, ToolCall, Usage
from eagle3.tokens.checklist import Outcome, Recorder, require
from eagle3.tokens.layout import Habits, lay_out, shapes_of
from eagle3.tokens.rendering import PromptRenderer

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
ADVICE = "Check the mode and its template options, the template and the grammar's modes."

HISTORY_ADVICE = (
    "Templates write finished turns by rules of their own, so this alone stops nothing. Compare the grammar's modes "
    "and tools with the model's own answers; billed counts decide."
)


def check_template(renderer: PromptRenderer, recorder: Recorder) -> None:
    """P5: the template opens answers as the grammar says, and writes finished ones as we lay them out."""
    grammar, mode = renderer.grammar, renderer.grammar.mode(renderer.mode)
    with recorder.check("P5", f"generation prompt of mode {renderer.mode}", ADVICE) as note:
        renderer.render_ids([{"role": "user", "content": QUESTION}])
        note(f"ends with {mode.prompt_ends_with!r}")
    if recorder.checks[-1].outcome is Outcome.FAILED:
        return
    cases: dict[str, Completion] = {}
    if mode.reasoning is None or not mode.reasoning.before:
        # A model that opens its reasoning itself may leave it out; templates then write it empty.
        cases["content"] = _answer(content=CONTENT)
    if mode.reasoning is not None:
        cases["reasoning and content"] = _answer(reasoning=REASONING, content=CONTENT)
    if grammar.tools is not None:
        reasoning = REASONING if mode.reasoning is not None else None
        cases["a tool call"] = _answer(reasoning=reasoning, num_calls=1)
        cases["content and two tool calls"] = _answer(reasoning=reasoning, content=CONTENT, num_calls=2)
    for name, answer in cases.items():
        title = f"answer of mode {renderer.mode} by the template: {name}"
        with recorder.check("P5", title, HISTORY_ADVICE, is_binding=False) as note:
            note(_compare(renderer, answer))


def check_literals(renderer: PromptRenderer, recorder: Recorder) -> None:
    """P7: the text of a control token in a conversation stays ordinary."""
    tokenizer = renderer.tokenizer
    with recorder.check("P7", f"control literals in prompts of mode {renderer.mode}", "Use another template.") as note:
        literals = sorted(tokenizer.control_literals)
        control = {tokenizer.control_id(literal) for literal in literals}
        plain = renderer.render_ids([{"role": "user", "content": "x"}])
        spiked = renderer.render_ids([{"role": "user", "content": " ".join(["x", *literals])}])
        expected = [token_id for token_id in plain if token_id in control]
        found = [token_id for token_id in spiked if token_id in control]
        require(found == expected, f"{len(found)} control ids with literals in the text, expected {len(expected)}.")
        note(f"{len(literals)} literals stay ordinary text")


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
