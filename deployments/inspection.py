"""What is registered on the configured Prefect server, for people who ask whether everything is there."""

from pathlib import Path
from typing import Any

import yaml
from prefect import get_client
from prefect.client.schemas.filters import WorkerFilter, WorkerFilterStatus
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound

from deployments.server import POOLS
from tasks.key_block import ApiKeyBlock

PROJECT = Path(__file__).resolve().parent.parent


def missing_deployments() -> list[str]:
    """Return names in prefect.yaml that the server does not know."""
    document: dict[str, Any] = yaml.safe_load((PROJECT / "prefect.yaml").read_bytes())
    with get_client(sync_client=True) as client:
        known = {deployment.name for deployment in client.read_deployments(limit=200)}
    return [entry["name"] for entry in document["deployments"] if entry["name"] not in known]


def pools_without_worker() -> list[str]:
    """Return work pools that no online worker serves."""
    lonely: list[str] = []
    with get_client(sync_client=True) as client:
        for name, _ in POOLS:
            try:
                workers = client.read_workers_for_work_pool(
                    name, worker_filter=WorkerFilter(status=WorkerFilterStatus(any_=[WorkerStatus.ONLINE]))
                )
            except ObjectNotFound:
                workers = []
            if not workers:
                lonely.append(name)
    return lonely


def key_blocks() -> list[str]:
    """Return the names of API key blocks."""
    slug = ApiKeyBlock.get_block_type_slug()
    with get_client(sync_client=True) as client:
        return [str(document.name) for document in client.read_block_documents_by_type(slug)]
