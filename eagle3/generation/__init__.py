"""Stage 2: buying answers. Never over budget, never twice for the same answer, whatever happens.

`journal` is the single truth on disk, `ledger` the money, `limiter` the number of requests at once, `engine` the loop
that sends them, `session` the thread that runs it, `shards` turns the journal into Parquet, `cost` plans.
"""

from eagle3.generation.session import (
    GenerationSession,
    generate,
    open_session,
    seal_completions,
    stopped_by_signals,
)
from eagle3.generation.shards import open_completions, prompt_shards

__all__ = [
    "GenerationSession",
    "generate",
    "open_completions",
    "open_session",
    "prompt_shards",
    "seal_completions",
    "stopped_by_signals",
]
