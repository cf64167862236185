"""A small model family made for tests: a byte-level vocabulary trained here, a grammar, a chat template."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import yaml

from eagle3.records import Completion, ToolCall, Usage
from eagle3.tokens.grammar import ResponseGrammar, load_grammar
from eagle3.tokens.layout import Habits, Shape, lay_out
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.tokenizer import Tokenizer, load_tokenizer

CONTROL = ["<|end|>", "<|user|>", "<|bot|>", "<think>", "</think>", "<|calls|>", "<|/calls|>", "<|arg|>", "[EOS]"]
NAMES = ["end", "user", "bot", "think_open", "think_close", "calls", "calls_end", "arg", "eos"]
CORPUS = [
    "The user wants an answer. Here it is: 42, and a list of words that come again and again.",
    'Call it with {"city": "Rome", "days": 3} and {"city":"Oslo","days":4} as arguments. The answer is in the text.',
    "Hello there, and hello again! What is the answer to the question of the user? The answer is 42.",
] * 4
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|user|>' if message.role == 'user' else '<|bot|>' }}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|bot|>{% if thinking %}<think>{% endif %}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A target directory with everything that belongs to it."""

    directory: Path
    document: dict[str, Any]
    grammar: ResponseGrammar
    tokenizer: Tokenizer

    def renderer(self, mode: str = "thinking") -> PromptRenderer:
        return PromptRenderer(self.directory, self.grammar, self.tokenizer, mode)

    def load(self, document: dict[str, Any], folder: Path) -> Tokenizer:
        """Load the tokenizer under a changed grammar."""
        return load_tokenizer(self.directory, write_grammar(document, folder))


def write_grammar(document: dict[str, Any], folder: Path) -> ResponseGrammar:
    path = folder / "family.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_grammar(path)


def build_vocabulary(path: Path) -> dict[str, int]:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    # Half of them are not "special", as in real vocabularies.
    library.add_special_tokens(CONTROL[:3])
    library.add_tokens(CONTROL[3:])
    library.save(str(path))
    return {text: library.token_to_id(text) for text in CONTROL}


def grammar_document(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "name": "tiny",
        "version": 1,
        "tokenizer": {"kind": "hf", "file": "tokenizer.json", "vocab_size": max(ids.values()) + 1},
        "control": {name: {"text": text, "id": ids[text]} for name, text in zip(NAMES, CONTROL, strict=True)},
        "modes": {
            "thinking": {
                "template_options": {"thinking": True},
                "prompt_ends_with": "<|bot|><think>",
                "reasoning": {"after": [{"token": "think_close"}]},
                "close": "think_close",
            },
            "opening": {
                "prompt_ends_with": "<|bot|>",
                "reasoning": {
                    "before": [{"token": "think_open"}, {"text": "\n", "padding": True}],
                    "after": [{"token": "think_close"}, {"text": "\n\n", "padding": True}],
                },
                "close": "think_close",
            },
            "plain": {"prompt_ends_with": "<|bot|>"},
        },
        "end": {"stop": ["end"], "tool_calls": ["end"]},
        "tools": {
            "before": [{"token": "calls"}],
            "call": [{"text": "{name}"}, {"token": "arg"}, {"text": "{arguments}"}],
            "between": [{"text": "\n"}],
            "after": [{"token": "calls_end"}],
            "implicit_close": True,
        },
    }


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    directory = tmp_path_factory.mktemp("tiny-target")
    ids = build_vocabulary(directory / "tokenizer.json")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    # As in real families, the tokenizer's own eos is not what ends an answer.
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[EOS]"}), encoding="utf-8")
    config = {"eos_token_id": ids["<|end|>"], "vocab_size": 1024}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    document = grammar_document(ids)
    grammar = write_grammar(document, directory)
    return Family(directory, document, grammar, load_tokenizer(directory, grammar))


CompletionFactory = Callable[..., Completion]


@pytest.fixture(scope="session")
def completion() -> CompletionFactory:
    def make(
        content: str | None = None,
        *,
        reasoning: str | None = None,
        calls: tuple[tuple[str, str], ...] = (),
        finish: str = "stop",
        billed: int = 0,
        number: int = 0,
        ids: list[int] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> Completion:
        return Completion(
            sample_id=f"{number:032x}",
            dataset="chat",
            reasoning=reasoning,
            content=content,
            tool_calls=tuple(
                ToolCall(id=f"functions.{name}:{index}", name=name, arguments=arguments)
                for index, (name, arguments) in enumerate(calls)
            ),
            finish_reason=finish,
            native_finish_reason=None,
            provider="Acme",
            model="acme/tiny",
            quantization=None,
            generation_id=None,
            usage=Usage(prompt_tokens=1, completion_tokens=billed),
            cost_usd=Decimal(0),
            cost_is_estimated=False,
            prompt_token_ids=prompt_ids,
            completion_token_ids=ids,
            latency_s=0.1,
            attempts=1,
            from_cache=False,
            raw_body=b"{}",
        )

    return make


@pytest.fixture(scope="session")
def truth(family: Family) -> Callable[..., list[int]]:
    """The ids that the tiny model writes for a completion, from a layout without any habit of a provider."""

    def ids_of(completion: Completion, mode: str = "thinking", shape: Shape | None = None) -> list[int]:
        pieces = lay_out(
            completion,
            family.grammar,
            mode,
            Habits(padding="restored"),
            shape or Shape(),
            family.tokenizer.encode_ordinary,
        )
        return [token_id for piece in pieces for token_id in piece.ids]

    return ids_of
