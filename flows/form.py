"""The types behind the run form: what a person may choose when starting a run, with bounds the browser checks.

No field is "one of these or nothing": the form shows that as a text box. A member of its own says nothing instead.
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

StageName: TypeAlias = Literal[
    "prompts", "generate", "reconstruct", "audit", "corpus", "extract", "train", "evaluate", "export"
]
"""Every stage by its command name."""

RedoName: TypeAlias = Literal["nothing", "reconstruct", "audit", "corpus", "extract", "train", "evaluate", "export"]
"""Stages that may be made anew; answers that were paid for are not among them."""

Overrides: TypeAlias = list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+=")]]
"""`section.key=value` pairs."""

BudgetUsd: TypeAlias = Annotated[float, Field(gt=0, le=100_000)] | None
