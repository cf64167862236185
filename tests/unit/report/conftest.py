import json
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from eagle3.artifacts import RunDirectory, ShardRef, Stage, StageManifest, StageStatus, commit_json
from eagle3.formats import CORPUS, TOKEN_SAMPLES, token_sample_to_row, write_rows
from eagle3.progress import ProgressEvent
from eagle3.progress_log import ProgressLog
from eagle3.records import Exactness, Segment, SegmentKind, TokenSample, canonical_json

EVIL = "<script>alert('x')</script>"
DATASETS = ("code", "chat")
PROVIDERS = {"Alpha": Decimal("0.0123"), EVIL: Decimal("0.0041")}
SHARD_SAMPLES = 20

PAUSE = "the account cannot pay.\n  Top it up and run again."
Maker = Callable[..., RunDirectory]

RECIPE = {
    "name": "synthetic",
    "target": {"name": "SmolLM2-135M-Instruct", "weights": {"kind": "directory", "path": "/srv/models/smol"}},
    "prompts": {"datasets": [{"name": name} for name in DATASETS]},
    "generation": {"budget_usd": "0.50"},
}


def samples_of(dataset: str, seed: int = 0) -> list[TokenSample]:
    source = random.Random(f"{dataset}{seed}")
    samples: list[TokenSample] = []
    for index in range(SHARD_SAMPLES):
        prompt, answer = source.randint(10, 90), int(source.lognormvariate(4.6, 0.6)) + 3
        samples.append(
            TokenSample(
                sample_id=f"{dataset}-{index:02d}",
                dataset=dataset,
                input_ids=[1] * (prompt + answer),
                num_prompt_tokens=prompt,
                segments=(
                    Segment(kind=SegmentKind.PROMPT, start=0, stop=prompt),
                    Segment(kind=SegmentKind.CONTENT, start=prompt, stop=prompt + answer - 1),
                    Segment(kind=SegmentKind.CONTROL, start=prompt + answer - 1, stop=prompt + answer),
                ),
                exactness=Exactness.COUNT_VERIFIED if index else Exactness.COUNT_REPAIRED,
                delta=0,
                provider="Alpha",
                model="m",
                finish_reason="stop",
            )
        )
    return samples


def _jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class _Builder:
    """Writes real stages, one after another, through the same functions as the real ones."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.inputs: dict[str, str] = {}

    def _seal(
        self,
        stage: Stage,
        files: dict[str, Callable[[Path], None]],
        stats: dict[str, object],
        *,
        tokens: int = 0,
        status: StageStatus = StageStatus.COMPLETE,
        only_shards: int | None = None,
    ) -> StageManifest | None:
        opened = self.run.open_stage(stage, {"stage": stage.value}, self.inputs)
        chosen = list(files.items())[:only_shards]
        shards: list[ShardRef] = [
            opened.commit_shard(name, write, num_samples=SHARD_SAMPLES, num_tokens=tokens) for name, write in chosen
        ]
        if only_shards is not None and status is StageStatus.COMPLETE:
            return None
        manifest = opened.seal(shards, stats, status)
        self.inputs = {stage.value: manifest.digest}
        return manifest

    def prompts(self) -> None:
        files = {
            f"{name}/shard-00000.jsonl": lambda path: _jsonl(path, [{"i": index} for index in range(SHARD_SAMPLES)])
            for name in DATASETS
        }
        figures = {
            "prompts": SHARD_SAMPLES,
            "samples": SHARD_SAMPLES + 1,
            "dropped": 1,
            "dropped_by_reason": {"special_literal": 1},
            "prompt_tokens": 900,
        }
        self._seal(Stage.PROMPTS, files, {"datasets": dict.fromkeys(DATASETS, figures)})

    def completions(self, *, status: StageStatus = StageStatus.COMPLETE, only_shards: int | None = None) -> None:
        files = {f"{name}/shard-00000.parquet": lambda path: path.write_bytes(b"answers") for name in DATASETS}
        stats = {
            "spent_usd": "0.0164",
            "held_usd": "0.0002",
            "planned_usd": {"expected": "0.0150", "worst": "0.0900"},
            "samples": 40,
            "failed": 2,
            "prompt_tokens": 1800,
            "completion_tokens": 4400,
            "by_provider": {
                name: {"samples": 30 if name == "Alpha" else 10, "completion_tokens": 2200, "cost_usd": str(cost)}
                for name, cost in PROVIDERS.items()
            },
            "datasets": {
                name: {"samples": 20, "failed": 1, "completion_tokens": 2200, "cost_usd": "0.0082"} for name in DATASETS
            },
        }
        self._seal(Stage.COMPLETIONS, files, stats, tokens=2200, status=status, only_shards=only_shards)
        folder = self.run.stage_path(Stage.COMPLETIONS)
        for name in DATASETS:
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "journal-0001.jsonl").write_text("{}\n", encoding="utf-8")
        failed = {"sample_id": "a", "dataset": "code", "message": "m", "attempts": 6}
        _jsonl(folder / "failed.jsonl", [{**failed, "failure": "rejected"}, {**failed, "failure": "retries_exhausted"}])

    def token_samples(self) -> None:
        files: dict[str, Callable[[Path], None]] = {}
        for name in DATASETS:
            rows = [token_sample_to_row(sample) for sample in samples_of(name)]
            files[f"{name}/shard-00000.parquet"] = lambda path, rows=rows: write_rows(path, rows, TOKEN_SAMPLES)
        everything = [sample for name in DATASETS for sample in samples_of(name)]
        prompt = sum(sample.num_prompt_tokens for sample in everything)
        total = sum(len(sample.input_ids) for sample in everything)
        stats = {
            "samples": 40,
            "exactness": {"count_verified": 38, "count_repaired": 2},
            "truth": {"identical": 30, "drifted_and_flagged": 8, "drifted_unseen_same_length": 2},
            "prompt_tokens": prompt,
            "completion_tokens": total - prompt,
        }
        self._seal(Stage.TOKEN_SAMPLES, files, stats, tokens=total // 2)

    def audit(self, verdict: str = "passed") -> None:
        report = {
            "num_samples": 40,
            "num_kept": 39,
            "verdict": verdict,
            "counts": {"truncated": {"error": 1}, "systematic_mismatch": {"critical": 0 if verdict == "passed" else 3}},
            "exactness": {"count_verified": 38, "count_repaired": 2},
            "delta_by_provider": {"Alpha": {"0": 28, "1": 2}, EVIL: {"0": 9, "-2": 1}},
            "findings": [],
            "dropped": {"code-03": "truncated"},
        }
        commit_json(self.run.stage_path(Stage.AUDIT) / "report.json", report)
        if verdict == "passed":
            self._seal(Stage.AUDIT, {}, {"verdict": verdict, "kept": 39, "dropped": 1, "counts": report["counts"]})

    def corpus(self) -> None:
        rows = [
            {key: value for key, value in token_sample_to_row(sample).items() if key in CORPUS.names}
            for sample in samples_of("code")
        ]
        files = {
            f"{split}/shard-00000.parquet": lambda path: write_rows(path, rows, CORPUS)
            for split in ("train", "validation")
        }
        stats = {
            "train": {"samples": 32, "tokens": 4000, "completion_tokens": 3000},
            "validation": {"samples": 6, "tokens": 700, "completion_tokens": 500},
            "left_out": {"too_long": 1},
            "corpus_digest": "c0ffee" * 10,
        }
        self._seal(Stage.CORPUS, files, stats)

    def later(self) -> None:
        gates = {"target_agreement": {"passed": True, "share": 0.93}, "order": {"passed": True, "checked": 32}}
        contract = {"layer_ids": [2, 15, 27], "dtype": "bfloat16", "target": "/srv/models/smol/model.safetensors"}
        draft: dict[str, object] = {
            "steps": 300,
            "final_loss": 2.125,
            "loss_curve": [[step, 9.0 * 0.985**step + 2.1] for step in range(0, 300, 2)],
            "validation": [{"epoch": index, "loss": 5.0 - index, "accuracy": [0.4, 0.2]} for index in range(3)],
        }
        hidden = {"hs_0.safetensors": lambda path: path.write_bytes(b"states")}
        self._seal(Stage.HIDDEN_STATES, hidden, {"gates": gates, "contract": contract, "samples": 38, "tokens": 4700})
        self._seal(Stage.DRAFT, {"checkpoint.bin": lambda path: path.write_bytes(b"w")}, draft)
        acceptance: dict[str, object] = {
            "acceptance_length_trained": 1.62,
            "acceptance_length_untrained": 1.0,
            "acceptance_by_position": [0.41, 0.15, 0.06],
            "acceptance_by_position_untrained": [0.001, 0.0, 0.0],
            "rounds": 512,
            "layer_order": {"verdict": "clear"},
            "datasets": {name: {"acceptance_length": 1.6, "rounds": 256} for name in DATASETS},
        }
        self._seal(Stage.EVALUATION, {}, acceptance)
        self._seal(Stage.EXPORT, {"sglang/config.json": lambda path: path.write_text("{}")}, {"engines": ["sglang"]})


def write_progress(path: Path) -> None:
    now = [1_700_000_000.0]

    def tick() -> float:
        now[0] += 0.5
        return now[0]

    with ProgressLog(path, clock=tick, process_started=1.0) as log:
        for step in range(61):
            spent, flight = 0.0164 * step / 60, 500 * min(1.0, step / 10, (60 - step) / 15)
            values = {"spent_usd": spent, "held_usd": 0.00002 * flight, "in_flight": int(flight)}
            log(ProgressEvent(stage="generation", done=step, total=60, values=values))
            log(ProgressEvent(stage="generation", label="code", done=step, total=60, values={"spent_usd": spent / 9}))
    now[0] += 50_000.0
    with ProgressLog(path, clock=tick, process_started=2.0) as log:
        for step in range(1, 301):
            loss = 9.0 * 0.985**step + 2.1
            values = {"loss": loss, "epoch": 1 + step // 101}
            log(ProgressEvent(stage="training", done=step, total=300, unit="steps", values=values))


@pytest.fixture
def make_run(tmp_path: Path) -> Maker:
    """Make a run directory that got as far as `until`: a stage name in lower case, or one of the odd endings."""

    def make(until: str = "export") -> RunDirectory:
        run = RunDirectory(tmp_path / "runs" / "synthetic-0123456789ab")
        run.path.mkdir(parents=True)
        if until == "nothing":
            return run
        commit_json(run.path / "recipe.resolved.json", RECIPE)
        text = f"# {EVIL}\nkey: sk-or-v1-0123456789abcdef0123\n{canonical_json(RECIPE)}\n"
        (run.path / "recipe.yaml").write_text(text, encoding="utf-8")
        attempt = run.begin_attempt({"python": "3.11", "host": "secret-host", "packages": {"prefect": "3.9.1"}})
        commit_json(
            attempt / "made.json", {"wall_s": {"corpus": 1.5}, **({"paused": PAUSE} if until == "no credits" else {})}
        )
        builder = _Builder(run)
        builder.prompts()
        if until == "prompts":
            return run
        if until in ("half of completions", "no credits"):
            builder.completions(only_shards=1)
            return run
        if until == "paused":
            builder.completions(status=StageStatus.PAUSED, only_shards=1)
            return run
        builder.completions()
        builder.token_samples()
        if until == "failed audit":
            builder.audit("failed")
            return run
        builder.audit()
        builder.corpus()
        builder.later()
        write_progress(run.path / "progress.jsonl")
        return run

    return make
