"""Recipes, scenarios, server settings and the code that puts flows on a Prefect server."""
