"""Tokens rebuilt per CPU second, against bare tokenization of the same texts in the same run.

Run `python tests/bench/bench_reconstruction.py --data DIR [--samples 1000]`, where DIR holds `kimi-k2.5/` (vocabulary)
and `prompts/gsm8k/train.jsonl` (texts). Control: `encode_ordinary` of reasoning and content, and nothing else.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from eagle3.records import Completion, Usage
from eagle3.tokens.grammar import load_grammar
from eagle3.tokens.layout import Habits, Shape, billed_count, lay_out
from eagle3.tokens.profiles import ProviderProfile, fit_profile
from eagle3.tokens.reconstruct import reconstruct
from eagle3.tokens.tokenizer import Tokenizer, load_tokenizer

GRAMMAR = load_grammar("kimi-k2.5")
MODE = "thinking"
PROMPT_IDS = list(range(200))


def completions(data: Path, tokenizer: Tokenizer, count: int) -> list[Completion]:
    """Answers of about 1,300 tokens from a provider that puts a space after control tokens."""
    lines = (data / "prompts/gsm8k/train.jsonl").read_text("utf-8").split("\n")
    texts = [" ".join(json.loads(line).values()) for line in lines if line]
    rng = random.Random(0)
    made: list[Completion] = []
    for number in range(count):
        clean = Completion(
            sample_id=f"{number:032x}",
            dataset="bench",
            reasoning="\n\n".join(rng.sample(texts, 6)),
            content="\n".join(rng.sample(texts, 2)),
            tool_calls=(),
            finish_reason="stop",
            native_finish_reason=None,
            provider="Acme",
            model="kimi",
            quantization=None,
            generation_id=None,
            usage=Usage(prompt_tokens=200, completion_tokens=0),
            cost_usd=Decimal(0),
            cost_is_estimated=False,
            prompt_token_ids=None,
            completion_token_ids=None,
            latency_s=1.0,
            attempts=1,
            from_cache=False,
            raw_body=b"",
        )
        pieces = lay_out(clean, GRAMMAR, MODE, Habits(), Shape(), tokenizer.encode_ordinary)
        billed = billed_count(pieces, GRAMMAR, MODE, Habits())
        usage = replace(clean.usage, completion_tokens=billed)
        made.append(replace(clean, reasoning=f" {clean.reasoning}", content=f" {clean.content}", usage=usage))
    return made


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def rebuild(answers: list[Completion], tokenizer: Tokenizer, profile: ProviderProfile) -> int:
    results = [reconstruct(each, PROMPT_IDS, GRAMMAR, tokenizer, profile, mode=MODE) for each in answers]
    return sum(len(result.sample.input_ids) - len(PROMPT_IDS) for result in results)


def rebuild_alone(data: Path, answers: list[Completion], profile: ProviderProfile) -> float:
    """What a worker process does with its share; returns CPU seconds without loading."""
    tokenizer = load_tokenizer(data / "kimi-k2.5", GRAMMAR)
    return cpu_seconds(lambda: rebuild(answers, tokenizer, profile))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1000)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.data / "kimi-k2.5", GRAMMAR)
    answers = completions(options.data, tokenizer, options.samples)
    profile = fit_profile(answers, GRAMMAR, tokenizer, MODE, min_samples=20)
    num_tokens = rebuild(answers, tokenizer, profile)
    encode = tokenizer.encode_ordinary
    rounds = [
        (
            cpu_seconds(lambda: [(encode(each.reasoning or ""), encode(each.content or "")) for each in answers]),
            cpu_seconds(lambda: rebuild(answers, tokenizer, profile)),
        )
        for _ in range(3)
    ]
    bare, ours = (min(times) for times in zip(*rounds, strict=True))
    fit = cpu_seconds(lambda: fit_profile(answers, GRAMMAR, tokenizer, MODE, min_samples=20))
    print(f"{len(answers)} answers, {num_tokens / 1e6:.2f} M tokens, {len(profile.rivals)} rival habits")
    print(f"bare tokenization  {num_tokens / bare / 1e6:.2f} M tokens per CPU second")
    print(f"reconstruction     {num_tokens / ours / 1e6:.2f} M tokens per CPU second, {bare / ours:.0%} of bare")
    print(f"fitting a profile  {fit / len(answers) * 1e3:.2f} ms per answer")
    with ProcessPoolExecutor(2) as pool:
        half = len(answers) // 2
        jobs = [pool.submit(rebuild_alone, options.data, part, profile) for part in (answers[:half], answers[half:])]
        shared = sum(job.result() for job in jobs)
    print(f"two processes      {num_tokens / shared / 1e6:.2f} M tokens per CPU second each")


if __name__ == "__main__":
    main()
