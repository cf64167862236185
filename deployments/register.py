"""Putting work pools, deployments, blocks and automations on the configured Prefect server, as often as you like.

Every call says what it changed; a second call says that nothing did.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import yaml
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    ArtifactCreate,
    GlobalConcurrencyLimitCreate,
    GlobalConcurrencyLimitUpdate,
    WorkPoolCreate,
)
from prefect.client.schemas.filters import ArtifactCollectionFilter, ArtifactCollectionFilterKey
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.workers.process import ProcessWorker

from deployments.automations import register_automations
from deployments.server import POOLS
from eagle3.errors import ConfigurationError
from eagle3.recipe import load_recipe
from tasks.key_block import ApiKeyBlock
from tasks.progress import artifact_key
from tasks.storage_block import StorageRootBlock

PROJECT = Path(__file__).resolve().parent.parent
_COMPARED = (
    "description", "entrypoint", "parameters", "work_pool_name", "tags", "job_variables", "pull_steps", "paused",
    "parameter_openapi_schema", "concurrency_options",
)  # fmt: skip
"""Fields of a deployment that decide what its runs do or how its form looks."""


def register(say: Callable[[str], None]) -> list[str]:
    """Register everything; returns and says what changed, one line each.

    Raises:
        ConfigurationError: The server refused, prefect.yaml is not there, or a recipe it names is not valid.
    """
    if not (PROJECT / "prefect.yaml").is_file():
        raise ConfigurationError("prefect.yaml is not beside the installed package; run this from a project checkout.")
    document: dict[str, Any] = yaml.safe_load((PROJECT / "prefect.yaml").read_bytes())
    recipes = _recipes(document)
    changes: list[str] = []
    with get_client(sync_client=True) as client:
        changes += _register_pools(client)
        changes += _register_limits(client, document["definitions"]["global_limits"])
        before = _deployments(client)
        _prefect("--no-prompt", "deploy", "--all")
        changes += _differences(before, _deployments(client))
        changes += _register_recipes(client, recipes)
        changes += _register_blocks(client)
        automation_changes, remarks = register_automations(client, PROJECT / "deployments" / "automations.yaml")
        changes += automation_changes
    for line in [*changes, *remarks]:
        say(line)
    if not changes:
        say("nothing changed: work pools, limits, deployments, recipes, blocks and automations are as they should be")
    return changes


def _recipes(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    paths = {
        entry["parameters"]["recipe"] for entry in document["deployments"] if "recipe" in entry.get("parameters", {})
    }
    loaded = [load_recipe(PROJECT / path) for path in sorted(paths)]
    return {recipe.name: recipe.model_dump(mode="json") for recipe in loaded}


def _register_pools(client: SyncPrefectClient) -> list[str]:
    changes: list[str] = []
    for name, _ in POOLS:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            template = ProcessWorker.get_default_base_job_template()
            with suppress(ObjectAlreadyExists):  # the client repeats a call whose reply was lost
                client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
            changes.append(f"work pool {name}: created")
    return changes


def _register_limits(client: SyncPrefectClient, limits: Mapping[str, int]) -> list[str]:
    changes: list[str] = []
    for name, slots in limits.items():
        try:
            found = client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=slots))
            changes.append(f"global limit {name}: created, {slots} slots")
            continue
        if found.limit != slots:
            client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(limit=slots))
            changes.append(f"global limit {name}: {found.limit} -> {slots} slots")
    return changes


def _deployments(client: SyncPrefectClient) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    page: Sequence[DeploymentResponse] = client.read_deployments(limit=200)
    for deployment in page:
        if not {"eagle3", "eagle3-service"} & set(deployment.tags):
            continue
        values = deployment.model_dump(mode="json")
        kept: dict[str, Any] = {name: values[name] for name in _COMPARED}
        kept["concurrency_limit"] = (values["global_concurrency_limit"] or {}).get("limit")
        kept["schedules"] = [
            {"slug": entry["slug"], "active": entry["active"], "schedule": _without_anchor(entry["schedule"])}
            for entry in values["schedules"]
        ]
        found[deployment.name] = kept
    return found


def _without_anchor(schedule: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schedule.items() if key != "anchor_date"}


def _differences(before: Mapping[str, dict[str, Any]], after: Mapping[str, dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for name, values in after.items():
        if name not in before:
            lines.append(f"deployment {name}: created")
            continue
        lines += [f"deployment {name}: {line}" for line in changed_fields(before[name], values)]
    return lines


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Say field by field how `new` differs from `old`; long values are cut."""
    lines: list[str] = []
    for key in sorted({*old, *new}):
        was, now = old.get(key), new.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            lines += changed_fields(cast("Mapping[str, Any]", was), cast("Mapping[str, Any]", now), f"{prefix}{key}.")
        elif was != now:
            lines.append(f"{prefix}{key}: {_short(was)} -> {_short(now)}")
    return lines


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _register_recipes(client: SyncPrefectClient, recipes: Mapping[str, dict[str, Any]]) -> list[str]:
    """Keep each recipe as an artifact: people see what a deployment runs, and the next call sees what changed."""
    changes: list[str] = []
    for name, values in recipes.items():
        key = artifact_key("recipe", name)
        stored = client.read_latest_artifacts(
            artifact_filter=ArtifactCollectionFilter(key=ArtifactCollectionFilterKey(any_=[key]))
        )
        known = _recipe_in(str(stored[0].data)) if stored else None
        if known == values:
            continue
        lines = changed_fields(known, values) if known is not None else ["created"]
        changes += [f"recipe {name}: {line}" for line in lines]
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        client.create_artifact(
            ArtifactCreate(
                type="markdown",
                key=key,
                data=f"# Recipe {name}\n\n{_FENCE}yaml\n{text}{_FENCE}\n",
                description="The recipe as deployed, with every default.",
            )
        )
    return changes


_FENCE = "```"


def _recipe_in(markdown: str) -> dict[str, Any] | None:
    parts = markdown.split(_FENCE)
    if len(parts) != 3:
        return None
    return cast("dict[str, Any]", yaml.safe_load(parts[1].removeprefix("yaml\n")))


def _register_blocks(client: SyncPrefectClient) -> list[str]:
    changes: list[str] = []
    for block in (ApiKeyBlock, StorageRootBlock):
        slug = block.get_block_type_slug()
        try:
            client.read_block_type_by_slug(slug)
        except ObjectNotFound:
            changes.append(f"block type {slug}: created")
        block.register_type_and_schema()
    return changes


def _prefect(*arguments: str) -> None:
    environment = {**os.environ, "PWD": str(PROJECT), "PREFECT_CLI_PROMPT": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise ConfigurationError(
            f"'prefect {' '.join(arguments)}' ended with {done.returncode}: {' '.join(lines[-5:])}"
        )
