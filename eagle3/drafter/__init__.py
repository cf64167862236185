"""Stages 7 to 9: train the draft (adapter to speculators), measure its acceptance, export it for engines.

`training`, `evaluation` and `export` drive one stage each. torch, transformers and speculators are imported when a
stage runs, never by importing this package.
"""

from eagle3.drafter.evaluation import evaluate_draft
from eagle3.drafter.export import export_draft
from eagle3.drafter.training import train_draft

__all__ = ["evaluate_draft", "export_draft", "train_draft"]
