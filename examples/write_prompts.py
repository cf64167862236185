"""Write the example prompts: three JSONL datasets made of the hand-written parts in `prompt_parts.yaml`.

Every family of a dataset pairs its phrasings with its topics by index arithmetic, without a random source, and the
families are interleaved in proportion to their counts: each run writes the same bytes, and any slice of a file looks
like the whole. Usage: `python examples/write_prompts.py`.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import yaml

EXAMPLES = Path(__file__).parent

Message: TypeAlias = "dict[str, str]"
Phrasing: TypeAlias = "str | list[Message]"
Topic: TypeAlias = "str | dict[str, str | int]"


def combine(phrasings: Sequence[Phrasing], topics: Sequence[Topic], count: int) -> Iterator[list[Message]]:
    """Pair phrasings with topics so that no pair comes twice.

    Topics go round in order. Phrasings go round too, and each full round of topics shifts them by one when the two
    lengths share a factor, so that a topic meets another phrasing in every round.

    Args:
        phrasings: User texts, or message lists written as one-key mappings `{role: text}`.
        topics: Fillers of the placeholders.
        count: Number of prompts; at most `len(phrasings) * len(topics)`.

    Yields:
        OpenAI messages of one prompt.

    Raises:
        ValueError: A pair came twice: the family needs more topics or phrasings.
    """
    seen: set[tuple[int, int]] = set()
    for k in range(count):
        topic_index = k % len(topics)
        shift = k // len(topics) if len(topics) % len(phrasings) == 0 else 0
        phrasing_index = (k + shift) % len(phrasings)
        if (topic_index, phrasing_index) in seen:
            raise ValueError(
                f"{len(phrasings)} phrasings x {len(topics)} topics repeat a pair at prompt {k} of {count}: "
                "add a topic or a phrasing"
            )
        seen.add((topic_index, phrasing_index))
        topic = topics[topic_index]
        fields: dict[str, str | int] = {"topic": topic} if isinstance(topic, str) else topic
        phrasing = phrasings[phrasing_index]
        turns: list[Message] = [{"user": phrasing}] if isinstance(phrasing, str) else phrasing
        yield [{"role": role, "content": text.format(**fields)} for turn in turns for role, text in turn.items()]


def interleave(families: Sequence[Sequence[list[Message]]]) -> list[list[Message]]:
    """Merge families in proportion to their sizes, keeping each family's order."""
    keyed = [
        ((position + 0.5) / len(family), rank, prompt)
        for rank, family in enumerate(families)
        for position, prompt in enumerate(family)
    ]
    return [prompt for _, _, prompt in sorted(keyed, key=lambda item: item[:2])]


def write_datasets(directory: Path) -> None:
    """Write `<dataset>.jsonl` into an existing directory for every dataset of the parts file."""
    parts = cast(
        "dict[str, list[dict[str, object]]]", yaml.safe_load((EXAMPLES / "prompt_parts.yaml").read_text("utf-8"))
    )
    for dataset, families in parts.items():
        prompts = interleave(
            [
                list(
                    combine(
                        cast("list[Phrasing]", family["phrasings"]),
                        cast("list[Topic]", family["topics"]),
                        cast("int", family["count"]),
                    )
                )
                for family in families
            ]
        )
        lines = [
            json.dumps({"id": f"{dataset}-{number:04d}", "messages": messages}, ensure_ascii=False)
            for number, messages in enumerate(prompts, start=1)
        ]
        (directory / f"{dataset}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_datasets(EXAMPLES / "prompts")
