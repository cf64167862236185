"""Answers that were brought along: earlier local or bought completions take their place beside those of this run.

They are journaled as answers of the provider `imported`, cost nothing, count towards token budgets, and are never asked
for again. Later stages grade them by the same rules as any other: with native ids exactly, with billed counts by those,
without either as unverified.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from eagle3.artifacts import RunDirectory, Stage
from eagle3.errors import InputError
from eagle3.generation.history import History, replay
from eagle3.generation.journal import Journal
from eagle3.generation.reopening import reopen
from eagle3.generation.shards import prompt_shards, read_prompts
from eagle3.providers.wire import Answer, ReplyKind, parse_reply
from eagle3.recipe import Recipe
from eagle3.records import IMPORTED_PROVIDER, JsonObject, PromptRecord, Usage, canonical_json

MAX_EXAMPLES = 5
_ID_NAMES = ("token_ids", "completion_token_ids", "output_ids")
_MESSAGE_NAMES = ("content", "reasoning", "reasoning_content", "tool_calls")


@dataclass(slots=True)
class ImportResult:
    """What became of the lines of a file."""

    imported: int = 0
    completion_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Lines that were not taken, by reason."""
    examples: list[str] = field(default_factory=list[str])
    """The first lines that were not taken, with their reasons."""

    def skip(self, number: int, reason: str, detail: str = "") -> None:
        """Count a line that is not taken."""
        self.skipped[reason] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"line {number}: {reason}{': ' + detail if detail else ''}")

    def to_json(self) -> JsonObject:
        """Return the result as JSON values."""
        return {**asdict(self), "skipped": dict(sorted(self.skipped.items()))}


def import_answers(recipe: Recipe, run: RunDirectory, dataset: str, path: Path) -> ImportResult:
    """Take the answers of a JSON Lines file for the prompts of a dataset; the caller holds the run's lock.

    A line names its prompt by `id`, as in the prompt file, or by `messages` (and `tools`), at the top or in `request`.
    Its answer is `message`, or `content` with `reasoning` and `tool_calls`, or the last of `messages`, or a whole
    `response`; beside it may stand `finish_reason` (`stop` when absent), `usage`, `model`, `prompt_token_ids` and
    `token_ids` (or `output_ids`). Of several answers to one prompt, as many as it has replicas are taken. Importing a
    file twice changes nothing.

    Raises:
        InputError: The dataset or the file is unknown.
        StageMissingError: The prompts were not sealed.
    """
    names = [entry.name for entry in recipe.prompts.datasets]
    if dataset not in names:
        raise InputError(f"the recipe has no dataset {dataset!r}; it has {names[:5]}.")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as exc:
        raise InputError(f"answers {str(path)!r} cannot be read: {exc.strerror}. Give a JSON Lines file.") from exc
    history, _ = replay(run.stage_path(Stage.COMPLETIONS), names, recipe.generation.budget_usd)
    prompts = list(_prompts(run, dataset))
    result = ImportResult()
    entries = _entries(lines, prompts, history, recipe.generation.provider.model, result)
    if entries:
        asyncio.run(_write(run, dataset, entries))
        reopen(recipe, run)
    return result


def _entries(
    lines: Sequence[bytes], prompts: Sequence[PromptRecord], history: History, model: str, result: ImportResult
) -> list[JsonObject]:
    open_prompts: dict[str, list[PromptRecord]] = {}
    known: set[str] = set()
    for prompt in prompts:
        for name in (_name_of_id(prompt.prompt_id), _name_of_messages(prompt.messages, prompt.tools)):
            known.add(name)
            if history.sample(prompt.sample_id).answer is None:
                open_prompts.setdefault(name, []).append(prompt)
    taken: set[str] = set()
    entries: list[JsonObject] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        values = _values(line)
        if values is None:
            result.skip(number, "no JSON object")
            continue
        name = _name_of_line(values)
        if name not in known:
            result.skip(number, "no prompt of the dataset")
            continue
        places = [prompt for prompt in open_prompts.get(name, []) if prompt.sample_id not in taken]
        if not places:
            result.skip(number, "answered already")
            continue
        body = _body(values, model)
        parsed = parse_reply(body)
        if parsed.kind is not ReplyKind.ANSWER or parsed.answer is None:
            result.skip(number, "no answer", f"{parsed.kind.value} {parsed.detail}".strip())
            continue
        taken.add(places[0].sample_id)
        entry = _entry(places[0], parsed.answer, body)
        result.imported += 1
        result.completion_tokens += int(entry["usage"]["completion_tokens"])
        entries.append(entry)
    return entries


def _entry(prompt: PromptRecord, answer: Answer, body: bytes) -> JsonObject:
    usage = (answer.usage or Usage(prompt_tokens=0, completion_tokens=0))._asdict()
    if not usage["completion_tokens"]:
        usage["completion_tokens"] = len(answer.completion_token_ids or ())
    return {
        "kind": "answer",
        "id": prompt.sample_id,
        "attempt": 0,
        "attempts": 0,
        "cost_usd": "0",
        "charged_usd": "0",
        "is_estimated": False,
        "usage": usage,
        "provider": IMPORTED_PROVIDER,
        "generation_id": answer.generation_id,
        "paid_ids": [],
        "resolves": [],
        "from_cache": True,
        "latency_s": 0.0,
        "reply": body,
    }


def _body(values: JsonObject, model: str) -> bytes:
    """Return a line's answer as the body of a chat completion, which is what the journal keeps."""
    response: Any = values.get("response")
    if isinstance(response, dict):
        body = {"model": model, **cast("JsonObject", response)}
    else:
        message = _message_of(values)
        reason = values.get("finish_reason") or ("tool_calls" if message.get("tool_calls") else "stop")
        choice: JsonObject = {"message": message, "finish_reason": reason}
        ids = next((values[name] for name in _ID_NAMES if values.get(name)), None)
        if ids is not None:
            choice["token_ids"] = ids
        kept = {name: values[name] for name in ("usage", "prompt_token_ids") if values.get(name) is not None}
        body = {"model": values.get("model") or model, "choices": [choice], **kept}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _message_of(values: JsonObject) -> JsonObject:
    message: Any = values.get("message")
    if isinstance(message, dict):
        return cast("JsonObject", message)
    if any(name in values for name in _MESSAGE_NAMES):
        return {name: values[name] for name in _MESSAGE_NAMES if name in values}
    return _answer_in(values.get("messages")) or {}


def _answer_in(messages: Any) -> JsonObject | None:
    last: Any = cast("list[Any]", messages)[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        return None
    message = cast("JsonObject", last)
    return message if message.get("role") == "assistant" else None


def _name_of_line(values: JsonObject) -> str | None:
    request: Any = values.get("request")
    source = cast("JsonObject", request) if isinstance(request, dict) else values
    messages: Any = source.get("messages")
    if isinstance(messages, list) and messages:
        asked = cast("list[Any]", messages)
        if source is values and _answer_in(asked) is not None:
            asked = asked[:-1]
        tools: Any = source.get("tools")
        return _name_of_messages(asked, cast("list[Any]", tools) if isinstance(tools, list) else [])
    name = values.get("id")
    return _name_of_id(str(name)) if name is not None else None


def _name_of_id(prompt_id: str) -> str:
    return f"id {prompt_id}"


def _name_of_messages(messages: Sequence[Any], tools: Sequence[Any]) -> str:
    return f"messages {canonical_json([list(messages), list(tools)])}"


def _values(line: bytes) -> JsonObject | None:
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("JsonObject", value) if isinstance(value, dict) else None


def _prompts(run: RunDirectory, dataset: str) -> Iterator[PromptRecord]:
    for shard in prompt_shards(run.sealed(Stage.PROMPTS)):
        if Path(shard.path).parent.name == dataset:
            yield from read_prompts(run, shard)[0]


async def _write(run: RunDirectory, dataset: str, entries: Sequence[Mapping[str, Any]]) -> None:
    path = run.stage_path(Stage.COMPLETIONS)
    path.mkdir(parents=True, exist_ok=True)
    journal = Journal(path)
    try:
        written = [journal.append_later(dataset, dict(entry)) for entry in entries]
        for durable in written:
            await durable
    finally:
        await journal.aclose()
