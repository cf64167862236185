"""Automations of deployments/automations.yaml: created, and updated by name when they differ."""

from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import BlockDocument
from prefect.events.schemas.automations import AutomationCore

NOTIFY_BLOCK = "eagle3-notify"


def register_automations(client: SyncPrefectClient, path: Path) -> tuple[list[str], list[str]]:
    """Bring the server's automations to what the file says.

    Returns:
        Lines about what changed, and remarks about what was left out and why.
    """
    changes: list[str] = []
    remarks: list[str] = []
    block = _notification_block(client)
    for entry in yaml.safe_load(path.read_bytes())["automations"]:
        name = entry["name"]
        wanted = _resolved(entry, block)
        found = client.read_automations_by_name(name)
        if wanted is None:
            remarks.append(
                f"automation {name!r} is left out: to get messages, make a notification block named "
                f"{NOTIFY_BLOCK!r} (Blocks in the Prefect UI) and deploy again"
            )
            continue
        automation = AutomationCore.model_validate(wanted)
        if not found:
            client.create_automation(automation)
            changes.append(f"automation {name}: created")
        elif _comparable(found[0]) != _comparable(automation):
            client.update_automation(found[0].id, automation)
            changes.append(f"automation {name}: updated")
        for double in found[1:]:
            client.delete_automation(double.id)
            changes.append(f"automation {name}: a second one of this name was deleted")
    return changes, remarks


def _resolved(entry: dict[str, Any], block: BlockDocument | None) -> dict[str, Any] | None:
    """Return the entry with the notification block's id in place of its name; None when there is no block."""
    actions: list[dict[str, Any]] = []
    for action in entry["actions"]:
        if action["type"] != "send-notification":
            actions.append(action)
        elif block is None:
            return None
        else:
            actions.append({**action, "block_document_id": str(block.id)})
    return {**entry, "actions": actions}


def _comparable(automation: AutomationCore) -> dict[str, Any]:
    values = AutomationCore.model_validate(automation.model_dump(mode="json")).model_dump(mode="json")
    trigger: dict[str, Any] = values["trigger"]
    trigger.pop("id", None)
    for name in ("after", "expect", "for_each"):  # sets, which come back in any order
        trigger[name] = sorted(trigger.get(name) or [])
    values.pop("enabled")  # somebody may have switched it off on purpose
    return values


def _notification_block(client: SyncPrefectClient) -> BlockDocument | None:
    documents = [document for document in client.read_block_documents(limit=200) if document.name == NOTIFY_BLOCK]
    return documents[0] if documents else None
