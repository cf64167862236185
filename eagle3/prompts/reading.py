"""Prompt files: from lines of JSONL or rows of Parquet to conversations of the right shape.

A file with a wrong shape stops the run before anything is spent, because a shape that is wrong once is usually wrong
everywhere. Whether a well-formed conversation can be asked is decided in `eagle3.prompts.screening`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3.errors import InputError
from eagle3.records import JsonObject, canonical_json, sha256_text

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles of OpenAI chat messages."""
KNOWN_KEYS = frozenset({"id", "messages", "tools"})
PARQUET_SUFFIX = ".parquet"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One line of a prompt file, of the right shape."""

    line: int
    """1-based line of a JSONL file or row of a Parquet file."""
    prompt_id: str
    """The author's `id`, or `line-<number>`."""
    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject]
    ignored_keys: frozenset[str]
    """Keys of the line that mean nothing to this project."""

    @property
    def key(self) -> str:
        """Digest of what is asked: equal for conversations that differ in key order or id alone."""
        return sha256_text(canonical_json([list(self.messages), list(self.tools)]))


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Yield the conversations of a JSONL or Parquet file, in file order.

    Lines of JSONL end at the newline byte alone, so that U+2028 and U+0085 inside strings stay what they are. Blank
    lines are skipped.

    Raises:
        InputError: The file is missing or empty, or a line has a wrong shape; the message names file and line.
    """
    if not path.is_file():
        raise InputError(f"prompt file {path.name!r} is missing. Check `path` of the dataset in the recipe.")
    empty = True
    rows = _parquet_rows(path) if path.suffix == PARQUET_SUFFIX else _json_lines(path)
    for number, value in rows:
        empty = False
        yield parse_conversation(value, number, path.name)
    if empty:
        raise InputError(f"prompt file {path.name!r} holds no prompt: expected one JSON object a line, found none.")


def parse_conversation(value: object, line: int, file_name: str) -> Conversation:
    """Check the shape of one line.

    Args:
        value: The line as parsed from JSON.
        line: Its number, for messages and for prompts without an id.
        file_name: For messages.

    Raises:
        InputError: The shape is wrong.
    """
    place = _Place(file_name, line)
    if not isinstance(value, dict):
        place.fail("an object with `messages`", value)
    entry = cast("JsonObject", value)
    if "messages" not in entry:
        place.fail("a key `messages`", sorted(entry)[:5])
    messages = _objects(entry["messages"], place, "`messages`")
    if not messages:
        place.fail("at least one message in `messages`", [])
    for index, message in enumerate(messages):
        _check_message(message, place, f"messages[{index}]")
    declared: object = entry.get("tools")
    tools = [] if declared is None else _objects(declared, place, "`tools`")
    prompt_id: object = entry.get("id")
    if prompt_id is not None and (isinstance(prompt_id, bool) or not isinstance(prompt_id, (str, int))):
        place.fail("a text or a whole number as `id`", prompt_id)
    for name in (*entry, str(prompt_id)):
        if _SURROGATE.search(name):
            place.fail("keys and `id` without halves of surrogate pairs, which no file can hold", name)
    return Conversation(
        line=line,
        prompt_id=f"line-{line}" if prompt_id is None else str(prompt_id),
        messages=tuple(messages),
        tools=tuple(tools),
        ignored_keys=frozenset(entry) - KNOWN_KEYS,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    file_name: str
    line: int

    def fail(self, expected: str, found: object) -> NoReturn:
        shown = repr(found)
        if len(shown) > 60:
            shown = f"{shown[:60]}…"
        raise InputError(
            f"{self.file_name!r} line {self.line}: expected {expected}, found {type(found).__name__} {shown}. "
            "Correct the line or remove it."
        )


def _objects(value: object, place: _Place, name: str) -> list[JsonObject]:
    if not isinstance(value, list):
        place.fail(f"{name} to be a list of objects", value)
    items = cast("list[object]", value)
    for item in items:
        if not isinstance(item, dict):
            place.fail(f"{name} to hold objects only", item)
    return cast("list[JsonObject]", items)


def _check_message(message: JsonObject, place: _Place, name: str) -> None:
    role: object = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        place.fail(f"{name}.role to be one of {sorted(ROLES)}", role)
    content: object = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return
    if isinstance(content, list):
        for part in _objects(cast("object", content), place, f"{name}.content"):
            if not isinstance(part.get("type"), str):
                place.fail(f"parts of {name}.content to have a `type`", sorted(part)[:5])
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                place.fail(f"text parts of {name}.content to have a `text`", part.get("text"))
    elif not isinstance(content, str):
        place.fail(f"{name}.content to be a text or a list of parts", content)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _json_lines(path: Path) -> Iterator[tuple[int, object]]:
    # Binary iteration splits at b"\n" alone; text iteration and str.splitlines would not.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                value: object = json.loads(text, parse_constant=_refuse_constant)
            except ValueError as exc:
                raise InputError(
                    f"{path.name!r} line {number}: expected one JSON object in UTF-8, found {exc}. "
                    "Correct the line or remove it."
                ) from exc
            yield number, value


def _parquet_rows(path: Path) -> Iterator[tuple[int, object]]:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as exc:
        raise InputError(f"prompt file {path.name!r} cannot be read as Parquet: {exc}. Check the file.") from exc
    rows = cast("list[Mapping[str, Any]]", table.to_pylist())
    for number, row in enumerate(rows, start=1):
        yield number, _without_nulls(row)


def _without_nulls(value: object) -> object:
    """Drop null fields: in a columnar file they only say that another row has the field."""
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, object]", value)
        return {key: _without_nulls(item) for key, item in fields.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[object]", value)]
    return value
