"""The Prefect settings we ship, and why. docs/operations.md explains them for people who run their own server."""

import secrets
from base64 import urlsafe_b64encode
from pathlib import Path


def server_settings(home: Path, url: str) -> dict[str, str]:
    """Return the environment of a local server at `url` (without `/api`) that keeps its files in `home`."""
    return {
        "PREFECT_HOME": str(home),
        # The UI calls port 4200 unless told otherwise; with another port its pages stay empty.
        "PREFECT_SERVER_UI_API_URL": f"{url}/api",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # The older interface shows the key of a block while it is typed.
        "PREFECT_SERVER_UI_V2_ENABLED": "true",
        # In-memory leases are lost at a restart and then block their slot for ever.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # SQLite answers 503 when a lock outlasts this many seconds.
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "7 days",
        # Without these any web page the user opens could start flow runs.
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": url,
        # Otherwise the key that encrypts secrets lies in the database beside them.
        "PREFECT_SERVER_ENCRYPTION_KEY": _encryption_key(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def _encryption_key(home: Path) -> str:
    """Return the key for block secrets, kept in a file that only its owner reads; made at the first start."""
    path = home / "encryption.key"
    if not path.is_file():
        home.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(urlsafe_b64encode(secrets.token_bytes(32)).decode(), encoding="ascii")
    return path.read_text(encoding="ascii")


def client_settings(home: Path, url: str) -> dict[str, str]:
    """Return the environment of flows and workers that talk to the server at `url`."""
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"{url}/api",
        # Pickled results would be code execution for whoever can write the folder.
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "results"),
        # Zombie detection needs a heartbeat; 30 s is the smallest allowed period.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        # The server may restart for a minute or two.
        "PREFECT_CLIENT_MAX_RETRIES": "12",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
