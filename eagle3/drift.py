"""Telling people how the recipe at hand differs from the settings that a stage was sealed from. Pure text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_SHOWN = 5
DIGEST_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a stage is made from."""

    identity: Mapping[str, Any]
    """Recipe values."""
    inputs: Mapping[str, str]
    """Digest of each thing read."""
    schema_version: int


def drift_message(stage: str, wanted: Origin, found: Origin, redo: str) -> str:
    """Say what differs and list the ways on.

    Args:
        stage: Folder of the stage.
        wanted: As the recipe and the files stand now.
        found: As the stage was sealed.
        redo: How to make the stage anew, as part of a sentence.
    """
    lines = differing_fields(wanted.identity, found.identity)
    lines += [
        f"input {name!r} now has digest {wanted.inputs.get(name, 'none')[:DIGEST_DIGITS]}, the run was made from "
        f"{found.inputs.get(name, 'none')[:DIGEST_DIGITS]}"
        for name in sorted(wanted.inputs.keys() | found.inputs.keys())
        if wanted.inputs.get(name) != found.inputs.get(name)
    ]
    if not lines:
        lines = [f"schema version {wanted.schema_version}, the run was made with {found.schema_version}"]
    more = f"\n  … and {len(lines) - MAX_SHOWN} more" if len(lines) > MAX_SHOWN else ""
    shown = "\n  ".join(lines[:MAX_SHOWN])
    return (
        f"stage {stage!r} was sealed from other settings:\n  {shown}{more}\nWays on: restore the recipe and the "
        f"files it names; or {redo}; or give the recipe another name to start a fresh run."
    )


def differing_fields(wanted: Mapping[str, Any], found: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Describe where two JSON objects differ, one line a field, with its dotted path.

    A missing field reads "nothing": identities leave out what is at its default.
    """
    lines: list[str] = []
    for key in sorted(set(wanted) | set(found)):
        value, other = wanted.get(key), found.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            lines.extend(differing_fields(value, other, f"{prefix}{key}."))  # pyright: ignore[reportUnknownArgumentType] - JSON
        elif key not in wanted or key not in found or value != other:
            said, used = (repr(values[key]) if key in values else "nothing" for values in (wanted, found))
            lines.append(f"{prefix}{key}: the recipe says {said}, the run was made with {used}")
    return lines
