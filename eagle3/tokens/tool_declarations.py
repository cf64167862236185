"""Tools as TypeScript, the way some chat templates declare them to the model.

Source: the format is that of Kimi K2.5's prompts, checked against the prompt tokens that providers billed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from eagle3.records import JsonObject

INDENT = "  "


def typescript_declarations(tools: Sequence[JsonObject]) -> str | None:
    """Return the declaration of all tools, or None when a schema cannot be expressed and JSON must be used."""
    lines = ["# Tools", "", "## functions", "namespace functions {"]
    for tool in tools:
        function: Any = tool.get("function")
        name = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str):
            return None
        parameters = cast("dict[str, Any]", function.get("parameters") or {"type": "object", "properties": {}})
        try:
            body = _type_of(parameters, 0)
        except (_NotExpressibleError, TypeError, AttributeError, RecursionError):
            # Whatever is no JSON schema has no TypeScript either.
            return None
        lines += _comment(function.get("description"), "")
        lines.append(f"type {name} = (_: {body}) => any;")
    return "\n".join([*lines, "}", ""])


class _NotExpressibleError(Exception):
    """A schema uses something TypeScript has no spelling for here."""


def _type_of(schema: Mapping[str, Any], depth: int) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(_type_of(option, depth) for option in schema["anyOf"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_type_of({**schema, "type": entry}, depth) for entry in cast("list[str]", kind))
    match kind:
        case "object":
            return _object(schema, depth)
        case "array":
            items = schema.get("items")
            inner = _type_of(cast("dict[str, Any]", items), depth) if items else "any"
            return f"Array<{inner}>"
        case "string" | "boolean" | "null":
            return str(kind)
        case "integer" | "number":
            return "number"
        case None:
            return "any"
        case _:
            raise _NotExpressibleError


def _object(schema: Mapping[str, Any], depth: int) -> str:
    properties = cast("dict[str, dict[str, Any]]", schema.get("properties") or {})
    if not properties:
        return "{}"
    required = set(cast("list[str]", schema.get("required") or []))
    inner = INDENT * (depth + 1)
    lines: list[str] = []
    for name in sorted(properties, key=lambda name: (name not in required, name)):
        lines += _comment(properties[name].get("description"), inner)
        mark = "" if name in required else "?"
        lines.append(f"{inner}{name}{mark}: {_type_of(properties[name], depth + 1)},")
    return "\n".join(["{", *lines, INDENT * depth + "}"])


def _comment(text: Any, indent: str) -> list[str]:
    if not isinstance(text, str) or not text:
        return []
    return [f"{indent}// {line}" for line in text.split("\n")]
