"""Stage 5: what is trained on. Choosing samples, holding some out, shuffling, and writing the Parquet corpus."""

from eagle3.corpus.stage import assemble_corpus

__all__ = ["assemble_corpus"]
