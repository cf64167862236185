"""How fast hidden states are extracted: dtype, batch size and storing, each against a batch of one.

    python tests/bench/bench_extraction.py TARGET_DIR [--answers FILE] [--tokens N] [--threads N] [--dtype D]

Prints tokens per wall second and per CPU second: on a shared machine only the second compares. One dtype and thread
count per call, because torch keeps its thread pool for the life of the process.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from eagle3.hidden_states.backend import plan_batches
from eagle3.hidden_states.contract import CaptureContract, checked_layer_ids
from eagle3.hidden_states.reading import read_target_shape
from eagle3.hidden_states.store import HiddenStateStore
from eagle3.hidden_states.transformers_backend import TransformersBackend

ANSWERS = Path(__file__).resolve().parents[2] / "examples" / "answers" / "smollm2-135m-instruct.jsonl"


def read_sequences(path: Path, tokens: int) -> list[list[int]]:
    sequences: list[list[int]] = []
    total = 0
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        if total >= tokens:
            break
        sequences.append(record["prompt_ids"] + record["output_ids"])
        total += len(sequences[-1])
    return sequences


def measure(
    backend: TransformersBackend, sequences: Sequence[Sequence[int]], batch_tokens: int, store: HiddenStateStore | None
) -> str:
    batches = plan_batches([len(ids) for ids in sequences], batch_tokens)
    backend.capture([sequences[index] for index in batches[-1]])  # first use allocates
    num_tokens = sum(len(ids) for ids in sequences)
    padded = sum(len(batch) * len(sequences[batch[0]]) for batch in batches)
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        chosen = [sequences[index] for index in batch]
        states = backend.capture(chosen)
        if store is not None:
            store.commit(batch, chosen, states)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return (
        f"batch_tokens {batch_tokens:5d}  {'stored' if store else 'forward only':12}  "
        f"{num_tokens / wall:7.0f} tok/s wall  {num_tokens / cpu:7.0f} tok/CPU-s  padding {padded / num_tokens - 1:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    shape = read_target_shape(arguments.target)
    layer_ids = checked_layer_ids(None, shape.num_layers)
    backend = TransformersBackend(arguments.target, layer_ids, arguments.dtype, arguments.threads)
    contract = CaptureContract(
        target=arguments.target.name,
        layer_ids=layer_ids,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        dtype=arguments.dtype,
        tokenizer_sha256="",
        weights_sha256="",
        transformers_version=backend.engine_version,
    )
    sequences = read_sequences(arguments.answers, arguments.tokens)
    print(f"{len(sequences)} sequences, {arguments.dtype}, {arguments.threads} thread(s)")
    for batch_tokens in (1, 512, 1024, 2048, 4096):
        print(measure(backend, sequences, batch_tokens, None), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(measure(backend, sequences, 2048, HiddenStateStore(Path(folder), contract)), flush=True)


if __name__ == "__main__":
    main()
