"""What probes settled about providers, as the file that a run keeps."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from eagle3.errors import CorruptShardError

PROBES_NAME = "probes.json"
"""Among the completions of a run."""

Settled: TypeAlias = Mapping[str, Mapping[str, frozenset[str | bool]]]
"""By provider and axis of its habits: the values that probes left, for axes where that is not all of them."""


def read_settled(path: Path) -> Settled:
    """Return what the probes of a run settled; nothing when it has none.

    Endpoints of one provider share its name in replies, so an axis counts only where all of them were probed with
    success, and with every value that one of them has.

    Raises:
        CorruptShardError: The file is not one of ours.
    """
    try:
        document: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise CorruptShardError(f"{path.name!r} is not JSON: {exc}. Restore the file.") from exc
    try:
        return _settled(cast("list[dict[str, Any]]", document["endpoints"]))
    except (KeyError, TypeError) as exc:
        raise CorruptShardError(f"{path.name!r} cannot be read as probes: {exc!r}. Restore the file.") from exc


def _settled(endpoints: list[dict[str, Any]]) -> Settled:
    found: dict[str, dict[str, frozenset[str | bool]]] = {}
    for endpoint in endpoints:
        own = {axis: frozenset(values) for axis, values in endpoint["settled"].items()}
        name: str = endpoint["provider"]
        known = found.get(name)
        found[name] = own if known is None else {axis: known[axis] | own[axis] for axis in known.keys() & own.keys()}
    return found
