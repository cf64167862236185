"""Stage 2: buying answers. Never over budget, never twice for the same answer, whatever happens.

`journal` is the single truth on disk and `history` its replay, `ledger` the money, `limiter` the number of requests at
once, `engine` the loop that sends them, `settlement` what their replies mean for the books, `session` the thread that
runs it all, `stage` its face, `shards` turns the journal into Parquet, `cost` plans.
"""

from eagle3.generation.aftermath import settle_sealed
from eagle3.generation.cost import CostPlan, DatasetCost, estimate_cost, plan_cost
from eagle3.generation.foreign import ImportResult, import_answers
from eagle3.generation.plan_table import render_plan
from eagle3.generation.reopening import reopen
from eagle3.generation.session import GenerationSession, open_session
from eagle3.generation.shards import open_completions, prompt_shards, read_failures
from eagle3.generation.stage import generate, seal_completions, stopped_by_signals
from eagle3.generation.watching import Answered, Check

__all__ = [
    "Answered",
    "Check",
    "CostPlan",
    "DatasetCost",
    "GenerationSession",
    "ImportResult",
    "estimate_cost",
    "generate",
    "import_answers",
    "open_completions",
    "open_session",
    "plan_cost",
    "prompt_shards",
    "read_failures",
    "render_plan",
    "reopen",
    "seal_completions",
    "settle_sealed",
    "stopped_by_signals",
]
