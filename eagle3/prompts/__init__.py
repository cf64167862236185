"""Stage 1: what is asked. Reading prompt files, checking and screening them, and writing prompt shards."""

from eagle3.prompts.stage import prepare_prompts

__all__ = ["prepare_prompts"]
