"""Prefect tasks. Each adds caching, retries, a name, artifacts and log lines to one library call, nothing else."""
