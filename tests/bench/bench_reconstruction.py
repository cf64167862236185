"""Tokens rebuilt and audited per CPU second, against bare tokenization of the same texts in the same run.

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

from eagle3.audit.sample_rules import audit_sample
from eagle3.audit.subject import Subject, TokenRules
from eagle3.records import Completion, PromptRecord, Usage
from eagle3.tokens.grammar import load_grammar
from eagle3.tokens.layout import Habits, Shape, billed_count, lay_out
from eagle3.tokens.profiles import ProviderProfile, fit_profile
from eagle3.tokens.reconstruct import reconstruct
from eagle3.tokens.tokenizer import Tokenizer, load_tokenizer

GRAMMAR = load_grammar("kimi-k2.5")
MODE = "thinking"
PROMPT_IDS = list(range(200))
MESSAGE = {"role": "user", "content": "How many apples are left?"}
PROMPT = PromptRecord(sample_id="0" * 32, dataset="bench", prompt_id="", messages=[MESSAGE])
LOADING_S = 20.0
"""Time that worker processes have to load before the clock starts."""


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
        usage = clean.usage._replace(completion_tokens=billed)
        made.append(replace(clean, reasoning=f" {clean.reasoning}", content=f" {clean.content}", usage=usage))
    return made


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def rebuild(answers: list[Completion], tokenizer: Tokenizer, profile: ProviderProfile) -> int:
    results = [reconstruct(each, PROMPT_IDS, GRAMMAR, tokenizer, profile, mode=MODE) for each in answers]
    return sum(len(result.sample.input_ids) - len(PROMPT_IDS) for result in results)


def rebuild_and_audit(answers: list[Completion], rules: TokenRules, profile: ProviderProfile) -> int:
    """Do what the watch over a generation does, one answer after the other; returns the number of findings."""
    tokenizer, found = rules.tokenizer, 0
    for each in answers:
        sample = reconstruct(each, PROMPT_IDS, GRAMMAR, tokenizer, profile, mode=MODE).sample
        found += len(audit_sample(Subject(prompt=PROMPT, completion=each, sample=sample, rules=rules)))
    return found


def work_alone(data: Path, answers: list[Completion], profile: ProviderProfile, start: float) -> tuple[float, float]:
    """What a worker process does with its share from a common start on; returns when it began and ended."""
    rules = TokenRules(GRAMMAR, load_tokenizer(data / "kimi-k2.5", GRAMMAR), MODE)
    rebuild_and_audit(answers[:20], rules, profile)
    time.sleep(max(start - time.time(), 0.0))
    begun = time.time()
    rebuild_and_audit(answers, rules, profile)
    return begun, time.time()


def wall_seconds(data: Path, shares: list[list[Completion]], profile: ProviderProfile) -> float:
    """Return how long worker processes need for their shares, loading left out."""
    with ProcessPoolExecutor(len(shares)) as pool:
        start = time.time() + LOADING_S
        spans = [job.result() for job in [pool.submit(work_alone, data, share, profile, start) for share in shares]]
    return max(ended for _, ended in spans) - min(begun for begun, _ in spans)


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
    rules = TokenRules(GRAMMAR, tokenizer, MODE)
    rebuild_and_audit(answers[:1], rules, profile)
    rounds = [
        (
            cpu_seconds(lambda: [(encode(each.reasoning or ""), encode(each.content or "")) for each in answers]),
            cpu_seconds(lambda: rebuild(answers, tokenizer, profile)),
            cpu_seconds(lambda: rebuild_and_audit(answers, rules, profile)),
        )
        for _ in range(3)
    ]
    bare, ours, audited = (min(times) for times in zip(*rounds, strict=True))
    fit = cpu_seconds(lambda: fit_profile(answers, GRAMMAR, tokenizer, MODE, min_samples=20))
    print(f"{len(answers)} answers, {num_tokens / 1e6:.2f} M tokens, {len(profile.rivals)} rival habits")
    print(f"bare tokenization  {num_tokens / bare / 1e6:.2f} M tokens per CPU second")
    print(f"reconstruction     {num_tokens / ours / 1e6:.2f} M tokens per CPU second, {bare / ours:.0%} of bare")
    print(f"and the audit      {num_tokens / audited / 1e6:.2f} M tokens per CPU second, {bare / audited:.0%} of bare")
    print(f"fitting a profile  {fit / len(answers) * 1e3:.2f} ms per answer")
    half = len(answers) // 2
    pairs = [
        (
            wall_seconds(options.data, [answers], profile),
            wall_seconds(options.data, [answers[:half], answers[half:]], profile),
        )
        for _ in range(2)
    ]
    one, two = (min(times) for times in zip(*pairs, strict=True))
    print(f"one process        {num_tokens / one / 1e6:.2f} M tokens per second")
    print(f"two processes      {num_tokens / two / 1e6:.2f} M tokens per second, {one / two:.2f} times one")


if __name__ == "__main__":
    main()
