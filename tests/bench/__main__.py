"""`make bench`: every benchmark, one after another, each in a process of its own.

Benchmarks of the model use the demo's target, converted once; the one that needs real tokenizers is left out, and says
so, when their folder is not at hand.
"""

import os
import subprocess
import sys
from pathlib import Path

from eagle3.recipe import load_recipe
from eagle3.target import prepare_target

BENCH = Path(__file__).resolve().parent
PROJECT = BENCH.parent.parent
DATA = Path(os.environ.get("EAGLE3_SHARED_DATA", PROJECT.parent / "shared" / "data"))


def arguments_of(name: str, target: Path) -> list[str] | None:
    """What a benchmark is called with; None when something it needs is missing."""
    if name in {"bench_extraction", "bench_training"}:
        return [str(target)]
    if name == "bench_reconstruction":
        return ["--data", str(DATA)] if DATA.is_dir() else None
    return []


def main() -> int:
    recipe = load_recipe(PROJECT / "deployments" / "recipes" / "tiny_cpu.yaml")
    target = prepare_target(recipe, Path(os.environ.get("EAGLE3_HOME", ".eagle3")).resolve() / "models")
    failed: list[str] = []
    for path in sorted(BENCH.glob("bench_*.py")):
        arguments = arguments_of(path.stem, target)
        if arguments is None:
            print(f"\n== {path.stem}: left out, set EAGLE3_SHARED_DATA to the folder of real tokenizers", flush=True)
            continue
        print(f"\n== {path.stem}", flush=True)
        if subprocess.run(
            [sys.executable, "-m", f"tests.bench.{path.stem}", *arguments], cwd=PROJECT, check=False
        ).returncode:
            failed.append(path.stem)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
