"""The endpoints as listed at each start of a run, kept beside the answers."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from eagle3.artifacts import commit_json
from eagle3.providers.base import Endpoint
from eagle3.records import JsonObject


def read_snapshots(path: Path) -> list[JsonObject]:
    """Return the snapshots taken so far, oldest first."""
    if not path.is_file():
        return []
    stored: JsonObject = json.loads(path.read_bytes())
    return stored["snapshots"]


def keep_snapshot(path: Path, endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Add a snapshot when it differs from the last; return every endpoint ever listed, newest first."""
    snapshots = read_snapshots(path)
    current = [_endpoint_json(endpoint) for endpoint in endpoints]
    if not snapshots or snapshots[-1]["endpoints"] != current:
        snapshots.append({"taken_at": datetime.now(UTC).isoformat(timespec="seconds"), "endpoints": current})
        commit_json(path, {"snapshots": snapshots})
    return known_endpoints(path)


def known_endpoints(path: Path) -> tuple[Endpoint, ...]:
    """Return every endpoint ever listed, newest first."""
    snapshots = reversed(read_snapshots(path))
    return tuple(endpoint_from_json(values) for entry in snapshots for values in entry["endpoints"])


def endpoint_from_json(values: JsonObject) -> Endpoint:
    """Return an endpoint of a snapshot."""
    fields: dict[str, Any] = dict(values)
    for name in ("prompt_usd", "completion_usd", "request_usd"):
        fields[name] = Decimal(values[name])
    fields["supported_parameters"] = tuple(values["supported_parameters"])
    return Endpoint(**fields)


def _endpoint_json(endpoint: Endpoint) -> JsonObject:
    return {
        "provider": endpoint.provider,
        "tag": endpoint.tag,
        "quantization": endpoint.quantization,
        "prompt_usd": f"{endpoint.prompt_usd:f}",
        "completion_usd": f"{endpoint.completion_usd:f}",
        "request_usd": f"{endpoint.request_usd:f}",
        "context_length": endpoint.context_length,
        "max_completion_tokens": endpoint.max_completion_tokens,
        "supported_parameters": list(endpoint.supported_parameters),
        "status": endpoint.status,
        "uptime_30m": endpoint.uptime_30m,
    }
