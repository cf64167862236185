"""Tool sections that come as text: control tokens when well-formed and not declared, ordinary text otherwise."""

from dataclasses import replace

import pytest

from eagle3.records import Exactness, SegmentKind
from eagle3.tokens.layout import Close, Habits, Shape, shapes_of
from eagle3.tokens.profiles import AXES, AxisFit, ProviderProfile
from eagle3.tokens.raw_tools import find_raw_section
from eagle3.tokens.reconstruct import reconstruct

CALL = 'look<|arg|>{"city": "Rome"}'
SECTION = f"<|calls|>{CALL}\n{CALL}<|/calls|>"


def profile(habits=None):
    habits = habits or Habits()
    axes = {axis: AxisFit(value=getattr(habits, axis), identified=True, discriminating=20) for axis in AXES}
    return ProviderProfile(
        provider="Acme",
        model="acme/tiny",
        mode="thinking",
        habits=habits,
        rivals=(),
        axes=axes,
        num_samples=100,
        num_exact=100,
        deltas={0: 100},
    )


@pytest.fixture
def rebuild(family):
    def run(answer, habits=None, **options):
        return reconstruct(
            answer, [1], family.grammar, family.tokenizer, profile(habits), mode="thinking", **options
        ).sample

    return run


@pytest.fixture
def billed(truth):
    """Bill an answer as if the model had written the given shape."""

    def make(answer, shape):
        return replace(answer, usage=answer.usage._replace(completion_tokens=len(truth(answer, shape=shape))))

    return make


def control_ids(family, sample):
    names = {token.id: name for name, token in family.grammar.control.items()}
    return [names[token_id] for token_id in sample.input_ids if token_id in names]


def test_whole_section_is_control_tokens(family, completion, billed, rebuild):
    answer = billed(completion(f"Wait.{SECTION}", reasoning="Hm"), Shape(has_raw_tools=True))
    sample = rebuild(answer)
    assert sample.exactness is Exactness.COUNT_VERIFIED
    assert control_ids(family, sample) == ["think_close", "calls", "arg", "arg", "calls_end", "end"]
    assert SegmentKind.TOOL in {segment.kind for segment in sample.segments}
    assert family.tokenizer.decode(sample.input_ids[1:]) == f"Hm</think>Wait.{SECTION}<|end|>"


def test_spaces_around_the_tokens_are_the_providers(completion, billed, rebuild):
    clean = billed(completion(f"Wait.{SECTION}", reasoning="Hm"), Shape(has_raw_tools=True))
    spaced = 'Wait. <|calls|> look <|arg|> {"city": "Rome"}\nlook <|arg|> {"city": "Rome"} <|/calls|>'
    seen = rebuild(replace(clean, content=spaced), Habits(head_space="strip", tail_space="strip"))
    assert seen.input_ids == rebuild(clean).input_ids


def test_declared_tools_leave_no_section_in_the_text(family, completion, billed, rebuild):
    answer = billed(completion(f"Wait.{SECTION}", reasoning="Hm"), Shape(has_raw_tools=True))
    sample = rebuild(answer, tools_declared=True)
    assert sample.exactness is Exactness.MISMATCH
    assert "calls" not in control_ids(family, sample)


def test_the_count_decides(family, completion, billed, rebuild):
    """A model that wrote about the format in ordinary pieces: many more tokens than control tokens would be."""
    sample = rebuild(billed(completion(f"Wait.{SECTION}", reasoning="Hm"), Shape()))
    assert sample.exactness is Exactness.COUNT_REPAIRED
    assert control_ids(family, sample) == ["think_close", "end"]


def test_section_that_closes_the_reasoning_by_itself(family, completion, billed, rebuild):
    shape = Shape(close=Close.IMPLICIT, has_raw_tools=True)
    sample = rebuild(billed(completion(SECTION, reasoning="Hm"), shape))
    assert control_ids(family, sample) == ["calls", "arg", "arg", "calls_end", "end"]


def test_cut_inside_a_section(family, completion, billed, rebuild):
    answer = completion('Wait.<|calls|>look<|arg|>{"ci', reasoning="Hm", finish="length")
    sample = rebuild(billed(answer, Shape(has_raw_tools=True)))
    assert sample.exactness is Exactness.COUNT_VERIFIED
    assert control_ids(family, sample) == ["think_close", "calls", "arg"]


@pytest.mark.parametrize(
    "text",
    [
        "<|calls|>",
        f"{SECTION} and more text",
        "<|calls|>look<|arg|>not JSON<|/calls|>",
        '<|calls|>look<|arg|>["no object"]<|/calls|>',
        '<|calls|>two words<|arg|>{"a": 1}<|/calls|>',
        '<|calls|><|arg|>look{"a": 1}<|/calls|>',
        f"<|/calls|>{CALL}<|calls|>",
        f"<|calls|>{CALL}{CALL}<|/calls|>",
        "no section at all",
    ],
)
def test_what_is_not_well_formed_stays_text(family, completion, text):
    assert find_raw_section(text, family.grammar, is_cut=False) is None
    shapes = shapes_of(completion(text, reasoning="Hm"), family.grammar, "thinking")
    assert not any(shape.has_raw_tools for shape in shapes)


def test_section_is_tiled_by_its_parts(family):
    found = find_raw_section(f"Wait.{SECTION}", family.grammar, is_cut=False)
    assert found is not None
    assert "".join(text for _, text in found.parts) == SECTION
    assert [name for name, _ in found.parts if name] == ["calls", "arg", "arg", "calls_end"]


def test_cut_parts_out_of_order_stay_text(family):
    assert find_raw_section("<|calls|>x<|/calls|>y", family.grammar, is_cut=True) is None
