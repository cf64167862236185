"""Stage 4: may this be trained on? One function per rule, a verdict, and a report."""

from eagle3.audit.stage import audit

__all__ = ["audit"]
