"""Prefect flows: the order in which tasks run, and nothing else."""
