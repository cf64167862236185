"""From a recipe to a served EAGLE-3 draft model: the library. It knows no Prefect and prints nothing."""

__version__ = "0.1.0"
