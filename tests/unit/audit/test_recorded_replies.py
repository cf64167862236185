"""The rules on real replies of Kimi-K2.5: silent on good ones, and loud on the two known oddities."""

import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eagle3.audit.sample_rules import audit_sample
from eagle3.audit.subject import Subject, TokenRules
from eagle3.records import Completion, PromptRecord, Severity, ToolCall, Usage
from eagle3.tokens.grammar import load_grammar
from eagle3.tokens.profiles import fit_profile
from eagle3.tokens.reconstruct import reconstruct
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.tokenizer import load_tokenizer

MODE = "thinking"
PROVIDERS = ("Chutes", "Inceptron", "ModelRun", "avian-kimi")


def completion_of(number: int, record: dict[str, Any]) -> Completion:
    message, usage = record["message"], record["usage"]
    calls = [
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return Completion(
        sample_id=f"r{number}",
        dataset="recorded",
        reasoning=message.get("reasoning") or message.get("reasoning_content"),
        content=message.get("content"),
        tool_calls=calls,
        finish_reason=record["finish_reason"],
        native_finish_reason=None,
        provider=record["provider"],
        model="kimi-k2.5",
        quantization=None,
        generation_id=None,
        usage=Usage(prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"]),
        cost_usd=Decimal(0),
        cost_is_estimated=False,
        prompt_token_ids=None,
        completion_token_ids=None,
        latency_s=1.0,
        attempts=1,
        from_cache=False,
        raw_body=b"",
    )


@pytest.fixture(scope="module")
def findings(shared_data: Path) -> dict[str, list[list[tuple[str, Severity]]]]:
    """Per provider and reply, in recorded order: which rules spoke and how loudly."""
    folder = shared_data / "kimi-k2.5"
    grammar = load_grammar("kimi-k2.5")
    tokenizer = load_tokenizer(folder, grammar)
    renderer = PromptRenderer(folder, grammar, tokenizer, MODE)
    rules = TokenRules(grammar, tokenizer, MODE)
    replies: defaultdict[str, list[tuple[dict[str, Any], Completion]]] = defaultdict(list)
    lines = (shared_data / "recordings" / "kimi_responses.jsonl").read_bytes().strip().split(b"\n")
    for number, line in enumerate(lines):
        record = json.loads(line)
        if record["provider"] in PROVIDERS:
            replies[record["provider"]].append((record["request"], completion_of(number, record)))
    found: dict[str, list[list[tuple[str, Severity]]]] = {}
    for provider, group in replies.items():
        profile = fit_profile([each for _, each in group], grammar, tokenizer, MODE, min_samples=20)
        found[provider] = []
        for request, completion in group:
            messages, tools = request["messages"], request.get("tools") or []
            prompt_ids = renderer.render_ids(messages, tools)
            sample = reconstruct(completion, prompt_ids, grammar, tokenizer, profile, mode=MODE).sample
            prompt = PromptRecord(
                sample_id=completion.sample_id, dataset="recorded", prompt_id="r", messages=messages, tools=tools
            )
            noticed = audit_sample(Subject(prompt, completion, sample, rules))
            found[provider].append([(finding.rule, finding.severity) for finding in noticed])
    return found


def test_first_turns_pass_every_rule(findings):
    assert findings["Inceptron"] == [[]]
    assert findings["ModelRun"] == [[]]
    assert findings["Chutes"][0] == []


def test_no_real_reply_breaks_the_grammar(findings):
    loudest = [severity for group in findings.values() for reply in group for _, severity in reply]
    assert Severity.CRITICAL not in loudest


def test_rewritten_history_and_another_template_show_in_the_prompt_count(findings):
    assert sum(("A08", Severity.ERROR) in reply for reply in findings["Chutes"]) == 1
    assert sum(("A08", Severity.ERROR) in reply for reply in findings["avian-kimi"]) == 2


def test_the_one_reply_with_a_wrong_bill_is_caught(findings):
    wrong = [("A05", Severity.ERROR) in reply for group in findings.values() for reply in group]
    assert sum(wrong) == 1
    assert any(("A05", Severity.ERROR) in reply for reply in findings["avian-kimi"])
