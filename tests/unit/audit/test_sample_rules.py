"""A clean sample passes; every planted fault is found by its own rule, at its own severity."""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3.audit.sample_rules import SAMPLE_RULES, audit_sample
from eagle3.audit.subject import Subject, TokenRules
from eagle3.records import Exactness, Segment, SegmentKind, Severity, ToolCall, Usage

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
CALL = ToolCall(id="functions.look_up:0", name="look_up", arguments='{"word": "tea"}')


@pytest.fixture
def subject(tiny_run) -> Callable[..., Subject]:
    """Build a subject from changes to a clean reply; `sample` changes its ids afterwards."""

    def build(run=tiny_run, *, text: str = "Is tea hot?", tools: Sequence[Any] = (), **reply: Any) -> Subject:
        renderer = run.renderer
        keeps = reply.pop("keeps_literals", False)
        rules = TokenRules(renderer.grammar, renderer.tokenizer, renderer.mode, keeps)
        prompt = run.prompt(text, tools=tools)
        completion = run.completion(prompt, **reply)
        return Subject(prompt=prompt, completion=completion, sample=run.sample(prompt, completion), rules=rules)

    return build


def with_ids(subject: Subject, ids: Sequence[int], segments: Sequence[tuple[SegmentKind, int]]) -> Subject:
    """The subject with other completion ids; segments are (kind, length) after the prompt."""
    start = subject.sample.num_prompt_tokens
    tiles = [Segment(kind=SegmentKind.PROMPT, start=0, stop=start)]
    for kind, length in segments:
        tiles.append(Segment(kind=kind, start=tiles[-1].stop, stop=tiles[-1].stop + length))
    assert tiles[-1].stop == start + len(ids)
    prompt_ids = tuple(subject.sample.input_ids[:start])
    sample = replace(subject.sample, input_ids=(*prompt_ids, *ids), segments=tuple(tiles))
    return replace(subject, sample=sample)


def given(subject: Subject) -> Subject:
    return replace(subject, sample=replace(subject.sample, exactness=Exactness.EXACT_IDS))


def found(subject: Subject) -> dict[str, Severity]:
    return {finding.rule: finding.severity for finding in audit_sample(subject)}


def encode(text: str) -> list[int]:
    return list(text.encode())


R, C, X, T = SegmentKind.REASONING, SegmentKind.CONTENT, SegmentKind.CONTROL, SegmentKind.TOOL


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"content": None, "reasoning": "Only thoughts.", "finish_reason": "stop"},
        {"calls": [CALL], "tools": [TOOL]},
        {"calls": [CALL, replace(CALL, id="functions.look_up:1")], "tools": [TOOL], "content": ""},
        {"reasoning": None, "content": "Raw thoughts.</think>And the answer."},
        {"content": 'So.<tools><call>functions.look_up:0<arg>{"word": "tea"}</call></tools>'},
        {"reasoning": "Emoji 👩‍👩‍👧 and \u2028 stay", "content": "\ttabs, 中文, é\r\n"},
    ],
)
def test_clean_answers_have_no_error(subject, reply):
    assert {rule for rule, severity in found(subject(**reply)).items() if severity is not Severity.WARNING} == set()


def test_a_plain_clean_answer_has_no_finding_at_all(subject, make_run):
    assert found(subject()) == {}
    assert found(subject(make_run(mode="plain"), reasoning=None)) == {}


def test_a01_missing_doubled_and_misplaced_end(subject):
    clean = subject()
    end, close = clean.rules.id_of("end"), clean.rules.id_of("think_close")
    body = [*encode("I think so."), close, *encode("Yes.")]
    tiles = [(R, 11), (X, 1), (C, 4)]
    missing = with_ids(clean, body, tiles)
    assert found(missing)["A01"] is Severity.CRITICAL
    assert found(given(missing))["A01"] is Severity.ERROR
    assert "A01" in found(with_ids(clean, [*body, end, end], [*tiles, (X, 2)]))
    cut = replace(clean, completion=replace(clean.completion, finish_reason="length"))
    assert found(cut)["A01"] is Severity.CRITICAL
    assert "A01" not in found(replace(with_ids(cut, body, tiles), completion=cut.completion))


def test_a02_missing_doubled_and_misplaced_close(subject, make_run):
    clean = subject()
    end, close = clean.rules.id_of("end"), clean.rules.id_of("think_close")
    missing = with_ids(clean, [*encode("I think so."), *encode("Yes."), end], [(R, 11), (C, 4), (X, 1)])
    assert found(missing)["A02"] is Severity.CRITICAL
    never = with_ids(clean, [*encode("I think so."), end], [(R, 11), (X, 1)])
    assert "A02" in found(never)
    double = [*encode("I think so."), close, close, *encode("Yes."), end]
    assert "A02" in found(with_ids(clean, double, [(R, 11), (X, 2), (C, 4), (X, 1)]))
    swapped = [*encode("Yes."), close, *encode("I think so."), end]
    assert "A02" in found(with_ids(clean, swapped, [(C, 4), (X, 1), (R, 11), (X, 1)]))
    plain = subject(make_run(mode="plain"), reasoning=None)
    assert "A02" in found(with_ids(plain, [close, *encode("Yes."), end], [(X, 1), (C, 4), (X, 1)]))


def test_a02_allows_an_answer_cut_inside_its_reasoning_and_an_implicit_close(subject):
    cut = subject(content=None, finish_reason="length", usage=Usage(prompt_tokens=0, completion_tokens=11))
    assert "A02" not in found(cut)
    clean = subject(calls=[CALL], tools=[TOOL], content=None)
    close = clean.rules.id_of("think_close")
    ids = [token_id for token_id in clean.completion_ids if token_id != close]
    kinds = [
        (segment.kind, segment.stop - segment.start - (close in clean.ids_of(segment)))
        for segment in clean.completion_segments
    ]
    assert "A02" not in found(with_ids(clean, ids, kinds))


def test_a03_control_id_in_text_unknown_id_and_unnamed_control_id(subject):
    clean = subject()
    end, close, user = (clean.rules.id_of(name) for name in ("end", "think_close", "user"))
    body = [*encode("I think so."), close, user, *encode("es."), end]
    tiles = [(R, 11), (X, 1), (C, 4), (X, 1)]
    assert found(with_ids(clean, body, tiles))["A03"] is Severity.CRITICAL
    assert found(given(with_ids(clean, body, tiles)))["A03"] is Severity.ERROR
    for wrong in (clean.rules.tokenizer.vocab_size, -1):
        assert "A03" in found(with_ids(clean, [*encode("I think so."), close, wrong, *encode("es."), end], tiles))
    reserved = clean.rules.tokenizer.control_id("<reserved>")
    unnamed = [*encode("I think so."), close, *encode("Yes."), reserved, end]
    assert "A03" in found(with_ids(clean, unnamed, [(R, 11), (X, 1), (C, 4), (X, 2)]))


def test_a04_ids_of_another_text(subject):
    clean = subject()
    end, close = clean.rules.id_of("end"), clean.rules.id_of("think_close")
    tiles = [(R, 11), (X, 1), (C, 4), (X, 1)]
    for body in (
        [*encode("I think SO."), close, *encode("Yes."), end],
        [*encode("I think so."), close, *encode("Yes!"), end],
    ):
        assert found(with_ids(clean, body, tiles))["A04"] is Severity.CRITICAL
        assert found(given(with_ids(clean, body, tiles)))["A04"] is Severity.WARNING
    two_spaces = subject(content="  Yes.")
    stripped = [*encode("I think so."), close, *encode("Yes."), end]
    assert "A04" in found(with_ids(two_spaces, stripped, tiles))
    one_space = subject(content=" Yes.")
    assert "A04" not in found(with_ids(one_space, stripped, tiles))
    called = subject(calls=[CALL], tools=[TOOL])
    other = replace(called.completion, tool_calls=(replace(CALL, arguments='{"word": "cup"}'),))
    assert found(replace(called, completion=other))["A04"] is Severity.CRITICAL


def test_a04_counts_ambiguous_ids_to_their_text(subject):
    clean = subject()
    segments = [(R, 11), (X, 1), (SegmentKind.AMBIGUOUS, 1), (C, 3), (X, 1)]
    assert found(with_ids(clean, clean.completion_ids, segments)) == {}
    assert found(with_ids(clean, clean.completion_ids, [(R, 10), (SegmentKind.AMBIGUOUS, 3), (C, 3), (X, 1)])) == {}


def test_a05_count_mismatch_and_nothing_rebuilt(subject):
    wrong = subject(delta=1)
    assert wrong.sample.exactness is Exactness.MISMATCH
    assert found(wrong) == {"A05": Severity.ERROR}
    clean = subject()
    assert found(with_ids(clean, [], [])) == {"A05": Severity.ERROR}


def test_a08_prompt_count(subject):
    clean = subject()
    usage = clean.completion.usage._replace(prompt_tokens=clean.completion.usage.prompt_tokens + 7)
    assert found(replace(clean, completion=replace(clean.completion, usage=usage))) == {"A08": Severity.ERROR}
    unbilled = clean.completion.usage._replace(prompt_tokens=0)
    assert found(replace(clean, completion=replace(clean.completion, usage=unbilled))) == {}


def test_a10_damaged_text(subject):
    assert found(subject(content="A \ufffd B"))["A10"] is Severity.ERROR
    assert found(subject(content="A \0 B")) == {"A10": Severity.WARNING}
    clean = subject()
    half = replace(clean, completion=replace(clean.completion, content="\ud83d"))
    assert found(half)["A10"] is Severity.ERROR


def test_a11_text_of_a_control_token_in_the_reply(subject):
    assert found(subject(content="The model says <user> here"))["A11"] is Severity.ERROR
    assert "A11" not in found(given(subject(content="The model says <user> here")))


def test_a12_broken_tool_calls(subject):
    assert found(subject(calls=[CALL]))["A12"] is Severity.ERROR
    for arguments in ('{"word": ', "[1]"):
        assert found(subject(calls=[replace(CALL, arguments=arguments)], tools=[TOOL]))["A12"] is Severity.ERROR
    clean = subject(calls=[CALL], tools=[TOOL])
    ids = list(clean.completion_ids)
    lost = ids.index(clean.rules.id_of("call_end"))
    tiles = [(each.kind, each.stop - each.start) for each in clean.completion_segments]
    owner = next(
        index
        for index, each in enumerate(clean.completion_segments)
        if each.start <= clean.sample.num_prompt_tokens + lost < each.stop
    )
    tiles[owner] = (tiles[owner][0], tiles[owner][1] - 1)
    assert found(with_ids(clean, ids[:lost] + ids[lost + 1 :], tiles))["A12"] is Severity.CRITICAL


def test_a13_empty_answer_and_missing_reasoning(subject):
    assert found(subject(content="")) == {"A13": Severity.WARNING}
    assert found(subject(reasoning="")) == {"A13": Severity.WARNING}


def test_a14_cut_answers(subject):
    assert found(subject(finish_reason="length")) == {"A14": Severity.WARNING}
    assert found(subject(finish_reason="length", calls=[CALL], tools=[TOOL]))["A14"] is Severity.ERROR
    assert found(subject(finish_reason="content_filter"))["A14"] is Severity.ERROR


def test_a15_long_runs(subject):
    monotonous = "".join(chr(0x4E00 + index % 20_000) for index in range(25_001))
    assert found(subject(content=monotonous)) == {"A15": Severity.WARNING}
    assert "A15" not in found(subject(content=monotonous[:20_000] + " " + monotonous[:5_001]))


def test_a16_reasoning_in_the_wrong_place(subject):
    thoughts = "The cup is hot, so the tea in it is hot."
    assert found(subject(reasoning=thoughts, content=f"{thoughts} Yes.")) == {"A16": Severity.ERROR}
    assert found(subject(content="<think>Yes."))["A16"] is Severity.ERROR
    assert found(subject(reasoning="So.</think>Yes.", content="Yes."))["A16"] is Severity.ERROR


def test_a17_text_that_the_tokenizer_rewrites(subject, make_run, nfc_target: Path):
    run = make_run(nfc_target)
    assert found(subject(run, content="cafe\u0301")) == {"A17": Severity.ERROR}
    assert found(subject(run, content="caf\u00e9")) == {}
    assert found(subject(content="cafe\u0301")) == {}


def test_a18_repetition(subject):
    assert found(subject(content="I am sorry, I can not do that. " * 40)) == {"A18": Severity.WARNING}
    prose = " ".join(f"Point {number}: {number * 7919 % 101} cups of tea" for number in range(60))
    assert "A18" not in found(subject(content=prose))


def test_a21_text_of_a_control_token_in_the_prompt(subject):
    assert found(subject(text="say <end> now")) == {"A21": Severity.ERROR}
    assert found(subject(text="say <end> now", keeps_literals=True)) == {"A21": Severity.WARNING}


def test_the_registry_names_each_rule_by_its_docstring():
    for name, rule in SAMPLE_RULES.items():
        assert (rule.__doc__ or "").startswith(name)


def test_a_wrong_id_at_any_position_is_found(subject):
    """No rule takes the ids on trust: whichever one is exchanged, one of those about structure or text objects."""
    clean = subject(calls=[CALL], tools=[TOOL], content="Tea, ja, ist heiß.")
    ids = list(clean.completion_ids)
    tiles = [(each.kind, each.stop - each.start) for each in clean.completion_segments]
    fixed = {name.encode() for name in (CALL.id,)}
    text = bytes(token_id for token_id in ids if token_id < 256)
    unseen = range(text.index(fixed.pop()), text.index(CALL.arguments.encode()))
    ordinary = [place for place, token_id in enumerate(ids) if token_id < 256]
    for place in range(len(ids)):
        spoiled = [*ids[:place], 7, *ids[place + 1 :]]
        severity = found(with_ids(clean, spoiled, tiles))
        if place in ordinary and ordinary.index(place) in unseen:
            continue  # the id of a call is nowhere but in the count
        assert Severity.CRITICAL in severity.values(), (place, ids[place])


def test_a04_text_that_the_grammar_puts_between_control_tokens(subject, make_run):
    clean = subject(make_run(mode="plain"), reasoning=None)
    size = len(clean.completion_ids) - 1
    ids = [*encode("hm"), *clean.completion_ids]
    assert found(with_ids(clean, ids, [(X, 2), (C, size), (X, 1)]))["A04"] is Severity.CRITICAL


def test_a12_control_tokens_of_calls_stand_in_order(subject):
    clean = subject(calls=[CALL, replace(CALL, id="functions.look_up:1")], tools=[TOOL])
    assert "A12" not in found(clean)
    swap = {clean.rules.id_of("call"): clean.rules.id_of("arg"), clean.rules.id_of("arg"): clean.rules.id_of("call")}
    ids = [swap.get(token_id, token_id) for token_id in clean.completion_ids]
    tiles = [(each.kind, each.stop - each.start) for each in clean.completion_segments]
    assert found(with_ids(clean, ids, tiles))["A12"] is Severity.CRITICAL


def test_a12_ids_of_calls_that_the_server_put_there(subject):
    grammar = subject().rules.grammar
    tools = grammar.tools.model_copy(update={"call_id": r"functions\.\w+:\d+"})
    rules = TokenRules(grammar.model_copy(update={"tools": tools}), subject().rules.tokenizer, "thinking")
    assert found(replace(subject(calls=[CALL], tools=[TOOL]), rules=rules)) == {}
    random = replace(subject(calls=[replace(CALL, id="call_9f3a")], tools=[TOOL]), rules=rules)
    assert found(random)["A12"] is Severity.ERROR
    assert "A12" not in found(given(random))


def test_a12_arguments_nested_beyond_reading(subject):
    deep = replace(CALL, arguments='{"word": ' + "[" * 100_000)
    assert found(subject(calls=[deep], tools=[TOOL]))["A12"] is Severity.ERROR


PROSE = "The tea is hot, and so is the kettle; 42 cups stand on the table beside a window of the old house. "


@pytest.mark.parametrize("period", [1, 7, 40, 300, 2_000])
@pytest.mark.parametrize("times", [2, 5, 9, 20, 80])
def test_a18_the_quick_look_misses_no_loop(subject, period, times):
    source = random.Random(period)
    unit = "".join(source.choices(PROSE + "äöü中文", k=period))
    text = unit * times
    data = text.encode()
    expected = len(data) >= 256 and len(data) / len(zlib.compress(data, 1)) > 8
    assert ("A18" in found(subject(content=text))) is expected
