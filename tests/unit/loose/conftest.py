"""A byte-level family on disk, and lines of reply files whose true ids are known."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3.loose.families import GrammarChoice
from tests.unit.conftest import CONTROL, NAMES, write_target

VOCAB = 256 + len(CONTROL) + 1


def grammar_document(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "version": 1,
        "tokenizer": {"kind": "hf", "file": "tokenizer.json", "vocab_size": VOCAB},
        "control": {
            key: {"text": text, "id": 256 + index} for index, (key, text) in enumerate(zip(NAMES, CONTROL, strict=True))
        },
        "modes": {
            "thinking": {
                "template_options": {"thinking": True},
                "prompt_ends_with": "<bot><think>",
                "reasoning": {"after": [{"token": "think_close"}]},
                "close": "think_close",
            },
            "instant": {"prompt_ends_with": "<bot>"},
        },
        "end": {"stop": ["end"], "tool_calls": ["end"]},
        "tools": {
            "before": [{"token": "section"}],
            "call": [
                {"token": "call"},
                {"text": "{id}"},
                {"token": "arg"},
                {"text": "{arguments}"},
                {"token": "call_end"},
            ],
            "after": [{"token": "section_end"}],
        },
        **changes,
    }


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("loose")
    write_target(place / "target")
    for name, changes in (("tiny", {}), ("other", {"models": ["*other*"]})):
        (place / f"{name}.yaml").write_text(yaml.safe_dump(grammar_document(name, **changes)), encoding="utf-8")
    return place


@pytest.fixture
def choice(place: Path) -> GrammarChoice:
    return GrammarChoice(tokenizer=place / "target", default=str(place / "tiny.yaml"))


@pytest.fixture
def line() -> Callable[..., dict[str, Any]]:
    """One line; every byte of text is a token, so counts are easy: texts, the close, the end."""

    def make(content: str | None = "Hi", reasoning: str | None = "Hm", **changes: Any) -> dict[str, Any]:
        billed = len(reasoning or "") + 1 + len(content or "") + 1
        made = {
            "request": {"model": "acme/tiny", "messages": [{"role": "user", "content": "Q"}]},
            "message": {"content": content, "reasoning": reasoning},
            "usage": {"prompt_tokens": 0, "completion_tokens": billed},
            "finish_reason": "stop",
            "provider": "Acme",
            "streamed": False,
        }
        return {**made, **changes}

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def run(*lines: Any) -> Path:
        path = tmp_path / "in.jsonl"
        parts = [entry if isinstance(entry, bytes) else json.dumps(entry).encode() for entry in lines]
        path.write_bytes(b"\n".join(parts) + b"\n")
        return path

    return run
