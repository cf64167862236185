"""Python's garbage collector, told to look rarely while thousands of requests are under way."""

import contextlib
import gc
from collections.abc import Generator

THRESHOLDS = (20_000, 20, 50)
"""Against Python's (700, 10, 10): a request makes hundreds of objects and no cycles, and a look goes through those of
all others. Source: tests/bench/bench_generation.py."""


@contextlib.contextmanager
def rare_collections() -> Generator[None]:
    """Leave everything that exists now out of collections, and collect rarely."""
    earlier = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*earlier)
        gc.unfreeze()
