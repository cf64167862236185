"""Streamed replies put back together: server-sent events in, one chat completion body out.

Texts are joined before anything reads them, so that no character or token is cut between two events, not even a
surrogate pair in two escapes. Usage may come in a last event without choices. What the events do not hold stays absent.
"""

import json
import re
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, cast

from eagle3.records import JsonObject

DATA = "data:"
END = "[DONE]"
_JOINED = ("content", "reasoning", "reasoning_content")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_IDS = ("token_ids", "response_token_ids")


def is_stream(text: str) -> bool:
    """Tell whether a body is a stream of events and not one JSON document."""
    first = text.lstrip()
    return first.startswith((DATA, ":", "event:"))


def join_stream(text: str) -> JsonObject:
    """Return the body that a server would have sent without streaming.

    Args:
        text: The events as received, keep-alive comments included.

    Raises:
        ValueError: An event is not JSON, or no event is an object.
    """
    body: JsonObject = {}
    choice: JsonObject = {}
    message: JsonObject = {}
    calls: list[tuple[int, JsonObject]] = []
    slots: dict[int, JsonObject] = {}
    for event in _events(text):
        body.update({key: value for key, value in event.items() if key != "choices" and value is not None})
        for entry in _objects(event.get("choices"))[:1]:
            delta = _object(entry.get("delta")) or _object(entry.get("message"))
            for key in _JOINED:
                if isinstance(delta.get(key), str):
                    message[key] = (message.get(key) or "") + delta[key]
            details = _objects(delta.get("reasoning_details"))
            if details:
                message.setdefault("reasoning_details", []).extend(details)
            _add_calls(calls, slots, delta)
            for key in _IDS:
                if isinstance(entry.get(key), list):
                    choice.setdefault(key, []).extend(entry[key])
            if _objects(_object(entry.get("logprobs")).get("content")):
                logprobs = choice.setdefault("logprobs", {"content": []})
                logprobs["content"].extend(entry["logprobs"]["content"])
            kept = ("finish_reason", "native_finish_reason", "error", "prompt_token_ids")
            choice.update({key: entry[key] for key in kept if entry.get(key) is not None})
    if not (body or choice or message or calls):
        raise ValueError("no event holds a JSON object")
    if calls:
        message["tool_calls"] = [call for _, call in sorted(calls, key=itemgetter(0))]
    if message or choice:
        body["choices"] = [{**choice, "message": message}]
    return cast("JsonObject", _mended(body)) if _SURROGATE.search(text) else body


def _mended(value: object) -> object:
    """Return a JSON value with halves of surrogate pairs put together.

    A half alone becomes U+FFFD, which can be written down and is found by the audit.
    """
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_mended(item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _mended(item) for key, item in cast("JsonObject", value).items()}
    return value


def _events(text: str) -> Iterator[JsonObject]:
    for line in text.split("\n"):
        if not line.startswith(DATA):
            continue
        data = line.removeprefix(DATA).strip()
        if not data or data == END:
            continue
        event: object = json.loads(data)
        if isinstance(event, dict):
            yield cast("JsonObject", event)


def _add_calls(calls: list[tuple[int, JsonObject]], slots: dict[int, JsonObject], delta: Mapping[str, Any]) -> None:
    for position, part in enumerate(_objects(delta.get("tool_calls"))):
        index = part.get("index")
        slot = index if isinstance(index, int) else position
        # Some servers give every call the index 0; another id is another call.
        if slot not in slots or part.get("id") not in (None, "", slots[slot].get("id")):
            slots[slot] = {}
            calls.append((slot, slots[slot]))
        _add_call(slots[slot], part)


def _add_call(call: JsonObject, part: Mapping[str, Any]) -> None:
    if part.get("id"):
        call["id"] = part["id"]
    function = call.setdefault("function", {"name": "", "arguments": ""})
    given = _object(part.get("function"))
    for key in ("name", "arguments"):
        if isinstance(given.get(key), str):
            function[key] += given[key]


def _object(value: object) -> JsonObject:
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def _objects(value: object) -> list[JsonObject]:
    if not isinstance(value, list):
        return []
    return [cast("JsonObject", entry) for entry in cast("list[object]", value) if isinstance(entry, dict)]
