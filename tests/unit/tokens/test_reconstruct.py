"""One completion to ids: every grade, every kind of answer, and laws that hold for all texts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import ReconstructionError
from eagle3.records import Exactness, Segment, SegmentKind, loss_mask
from eagle3.tokens.layout import Close, Habits, Shape
from eagle3.tokens.profiles import AXES, AxisFit, ProviderProfile
from eagle3.tokens.reconstruct import differing_positions, reconstruct, segment_ids, unrebuilt

PROMPT = [7, 8, 9]


def profile_with(habits=None, rivals=(), mode="thinking"):
    habits = habits or Habits()
    return ProviderProfile(
        provider="Acme",
        model="acme/tiny",
        mode=mode,
        habits=habits,
        rivals=tuple(rivals),
        axes={
            axis: AxisFit(
                value=getattr(habits, axis),
                identified=all(getattr(rival, axis) == getattr(habits, axis) for rival in rivals),
                discriminating=20,
            )
            for axis in AXES
        },
        num_samples=100,
        num_exact=100,
        deltas={0: 100},
    )


@pytest.fixture(scope="session")
def rebuild(family):
    def run(answer, profile=None, mode="thinking", **options):
        profile = profile or profile_with(mode=mode)
        return reconstruct(answer, PROMPT, family.grammar, family.tokenizer, profile, mode=mode, **options)

    return run


@pytest.fixture(scope="session")
def bill(truth):
    """Set the billed count of a completion to the true one."""

    def billed(answer, extra=0, **kwargs):
        return replace(answer, usage=answer.usage._replace(completion_tokens=len(truth(answer, **kwargs)) + extra))

    return billed


def check_tiling(sample):
    position = 0
    for segment in sample.segments:
        assert segment.start == position < segment.stop
        position = segment.stop
    assert position == len(sample.input_ids)


TEXT = st.text(alphabet=st.one_of(st.sampled_from(" \n<|end>think/[]EOS"), st.characters(codec="utf-8")), max_size=40)


@given(reasoning=TEXT, content=TEXT, arguments=TEXT, finish=st.sampled_from(["stop", "tool_calls", "length"]))
def test_ids_spell_the_text(family, completion, bill, rebuild, reasoning, content, arguments, finish):
    calls = (("look", arguments),) if finish == "tool_calls" else ()
    content = f"c{content}"
    answer = bill(completion(content, reasoning=f"r{reasoning}", calls=calls, finish=finish))
    sample = rebuild(answer).sample
    check_tiling(sample)
    assert list(sample.input_ids[:3]) == PROMPT
    text = family.tokenizer.decode(sample.input_ids[3:])
    call = f"<|calls|>look<|arg|>{arguments}<|/calls|>" if calls else ""
    end = "" if finish == "length" else "<|end|>"
    assert text == f"r{reasoning}</think>{content}{call}{end}"
    assert sample.exactness is Exactness.COUNT_VERIFIED
    assert sample.delta == 0


@given(text=TEXT)
def test_control_ids_never_come_out_of_text(family, completion, rebuild, text):
    sample = rebuild(completion(f"x{text}"), mode="plain").sample
    control = {token.id for token in family.grammar.control.values()}
    assert [token_id for token_id in sample.input_ids[3:] if token_id in control] == [family.grammar.control["end"].id]


def test_segments_and_loss(family, completion, bill, rebuild):
    sample = rebuild(bill(completion("Hi", reasoning="Hm"))).sample
    kinds = [segment.kind for segment in sample.segments]
    assert kinds == [
        SegmentKind.PROMPT,
        SegmentKind.REASONING,
        SegmentKind.CONTROL,
        SegmentKind.CONTENT,
        SegmentKind.CONTROL,
    ]
    mask = loss_mask(sample)
    assert mask == [False] * 3 + [True] * (len(sample.input_ids) - 3)
    assert sample.input_ids[-1] == family.grammar.control["end"].id


def test_no_count_is_unverified(completion, rebuild):
    sample = rebuild(completion("Hi", reasoning="Hm")).sample
    assert (sample.exactness, sample.delta) == (Exactness.UNVERIFIED, None)


@pytest.mark.parametrize("extra", [-2, -1, 1, 2])
def test_wrong_count_is_a_mismatch(completion, bill, rebuild, extra):
    result = rebuild(bill(completion("Hi there", reasoning="Hm"), extra=extra))
    assert (result.sample.exactness, result.sample.delta) == (Exactness.MISMATCH, -extra)
    assert result.alternatives == 0


def test_unidentified_billing_proves_less(completion, bill, rebuild):
    profile = profile_with(rivals=[Habits(end_billed=False)])
    sample = rebuild(bill(completion("Hi", reasoning="Hm")), profile).sample
    assert (sample.exactness, sample.delta) == (Exactness.COUNT_REPAIRED, 0)


def test_usual_spelling_is_no_finding(completion, bill, rebuild):
    profile = profile_with(rivals=[Habits(end_billed=False)])
    cut = bill(completion(reasoning="Hm", finish="length"), shape=Shape(close=Close.NONE))
    for answer in (cut, bill(completion("Hi", reasoning="Hm"))):
        result = rebuild(answer, profile)
        assert result.sample.delta == 0
        assert result.findings == ()


def test_open_axis_that_the_count_decides(family, completion, bill, rebuild):
    """Where the space is a token of its own, the answer's own count decides whose it is."""
    encode = family.tokenizer.encode_ordinary
    word = next(word for word in ("x", "Q", "zz", "#") if len(encode(" " + word)) == len(encode(word)) + 1)
    answer = replace(bill(completion("Hi", reasoning=word)), reasoning=" " + word)
    sample = rebuild(answer, profile_with(Habits(head_space="strip"), rivals=[Habits()])).sample
    assert sample.exactness is Exactness.COUNT_REPAIRED
    assert SegmentKind.AMBIGUOUS not in {segment.kind for segment in sample.segments}


def test_open_axis_that_the_count_cannot_decide_is_masked(family, completion, bill, rebuild):
    """' answer' and 'answer' are as many tokens when both are one; the first token is uncertain."""
    encode = family.tokenizer.encode_ordinary
    word = next(word for word in ("the", "The", "a", "in", "user") if len(encode(word)) == len(encode(" " + word)) == 1)
    answer = replace(bill(completion("Hi", reasoning=word)), reasoning=" " + word)
    result = rebuild(answer, profile_with(rivals=[Habits(head_space="strip")]))
    assert result.sample.exactness is Exactness.COUNT_AMBIGUOUS
    assert result.alternatives == 1
    assert result.sample.segments[1] == Segment(kind=SegmentKind.AMBIGUOUS, start=3, stop=4)
    assert sum(loss_mask(result.sample)) == len(result.sample.input_ids) - 4


def test_axis_that_is_irrelevant_for_the_sample(completion, bill, rebuild):
    profile = profile_with(rivals=[Habits(args_style="compact"), Habits(head_space="strip")])
    assert rebuild(bill(completion("Hi", reasoning="Hm")), profile).sample.exactness is Exactness.COUNT_VERIFIED


def test_space_before_the_end_against_an_unbilled_end(completion, bill, rebuild):
    """Both explain the count; the token after the gap is the one that is uncertain."""
    answer = replace(bill(completion("Hi.", finish="stop"), mode="plain"), content="Hi. ")
    profile = profile_with(Habits(tail_space="strip_all"), rivals=[Habits(end_billed=False)], mode="plain")
    sample = rebuild(answer, profile, mode="plain").sample
    assert sample.exactness is Exactness.COUNT_AMBIGUOUS
    assert sample.segments[-1] == Segment(
        kind=SegmentKind.AMBIGUOUS, start=len(sample.input_ids) - 1, stop=len(sample.input_ids)
    )


def test_respelled_arguments_are_found_by_count(completion, bill, rebuild):
    """Under a provider that re-serialises, the model's own spacing is whichever fits."""
    answer = bill(completion("Hi", reasoning="Hm", calls=(("look", '{"city":"Rome"}'),), finish="tool_calls"))
    seen = replace(answer, tool_calls=tuple(replace(call, arguments='{"city": "Rome"}') for call in answer.tool_calls))
    result = rebuild(seen, profile_with(Habits(args_style="spaced")))
    assert (result.sample.exactness, result.sample.delta) == (Exactness.COUNT_REPAIRED, 0)
    assert [finding.rule for finding in result.findings] == ["variant"]
    assert rebuild(seen, profile_with()).sample.exactness is Exactness.MISMATCH


def test_implicit_close_is_found_by_count(family, completion, bill, rebuild):
    shape = Shape(close=Close.IMPLICIT)
    answer = completion(reasoning="Hm", calls=(("look", "{}"),), finish="tool_calls")
    sample = rebuild(bill(answer, shape=shape)).sample
    assert sample.exactness is Exactness.COUNT_REPAIRED
    assert family.grammar.control["think_close"].id not in sample.input_ids
    assert rebuild(bill(answer)).sample.exactness is Exactness.COUNT_VERIFIED


@pytest.mark.parametrize("closed", [False, True])
def test_cut_in_or_just_after_the_reasoning(family, completion, bill, rebuild, closed):
    answer = completion(reasoning="Hm", finish="length")
    sample = rebuild(bill(answer, shape=Shape() if closed else Shape(close=Close.NONE))).sample
    assert sample.exactness is (Exactness.COUNT_REPAIRED if closed else Exactness.COUNT_VERIFIED)
    assert (sample.input_ids[-1] == family.grammar.control["think_close"].id) is closed


@pytest.mark.parametrize("finish", ["length", "content_filter", "error", "something new"])
def test_only_finished_answers_have_an_end(family, completion, bill, rebuild, finish):
    sample = rebuild(bill(completion("Hi", finish=finish), mode="plain"), mode="plain").sample
    assert family.grammar.control["end"].id not in sample.input_ids
    assert sample.exactness is Exactness.COUNT_VERIFIED


def test_raw_content_with_a_close_literal(completion, bill, rebuild):
    split = bill(completion("Hm</think>Hi"))
    assert rebuild(split).sample.exactness is Exactness.COUNT_VERIFIED
    ordinary = bill(completion("Hm</think>Hi"), shape=Shape(is_split=False))
    assert rebuild(ordinary).sample.exactness is Exactness.COUNT_REPAIRED


def test_reasoning_without_a_place_raises(completion, rebuild):
    with pytest.raises(ReconstructionError, match="has reasoning"):
        rebuild(completion("Hi", reasoning="Hm"), mode="plain")


def test_unrebuilt_is_a_visible_record(completion):
    result = unrebuilt(completion("Hi"), PROMPT, "why")
    check_tiling(result.sample)
    assert result.sample.exactness is Exactness.MISMATCH
    assert [(finding.rule, finding.detail) for finding in result.findings] == [("not-rebuilt", "why")]
    assert unrebuilt(completion("Hi"), [], "why").sample.segments == ()


class TestServerIds:
    def test_are_taken(self, completion, truth, bill, rebuild):
        answer = bill(completion("Hi", reasoning="Hm"))
        ids = truth(answer)
        result = rebuild(replace(answer, completion_token_ids=ids, prompt_token_ids=PROMPT))
        assert list(result.sample.input_ids) == PROMPT + ids
        assert (result.sample.exactness, result.sample.delta) == (Exactness.EXACT_IDS, 0)
        assert result.findings == ()
        assert result.sample.segments == rebuild(answer).sample.segments

    def test_are_ignored_on_request(self, completion, truth, bill, rebuild):
        answer = bill(completion("Hi", reasoning="Hm"))
        sample = rebuild(replace(answer, completion_token_ids=truth(answer)), use_server_ids=False).sample
        assert sample.exactness is Exactness.COUNT_VERIFIED

    def test_drift_is_noted(self, family, completion, truth, bill, rebuild):
        answer = completion("answer", reasoning="Hm")
        letters = [token_id for letter in "answer" for token_id in family.tokenizer.encode_ordinary(letter)]
        ids = [*truth(completion(None, reasoning="Hm"))[:-1], *letters, family.grammar.control["end"].id]
        seen = replace(answer, completion_token_ids=ids, usage=answer.usage._replace(completion_tokens=len(ids)))
        result = rebuild(seen)
        assert list(result.sample.input_ids[3:]) == ids
        assert [finding.rule for finding in result.findings] == ["drift"]
        assert "shows it" in result.findings[0].detail
        usual = truth(answer)
        first = next(index for index, token_id in enumerate(usual) if token_id != ids[index])
        assert result.findings[0].position == 3 + first

    def test_prompt_of_the_server_wins(self, completion, truth, bill, rebuild):
        answer = bill(completion("Hi", reasoning="Hm"))
        result = rebuild(replace(answer, completion_token_ids=truth(answer), prompt_token_ids=[1, 2]))
        assert list(result.sample.input_ids[:2]) == [1, 2]
        assert result.sample.num_prompt_tokens == 2
        assert [finding.rule for finding in result.findings] == ["server-prompt"]

    def test_billed_end_that_was_left_out_is_put_back(self, completion, truth, bill, rebuild):
        answer = bill(completion("Hi", reasoning="Hm"))
        result = rebuild(replace(answer, completion_token_ids=truth(answer)[:-1]))
        assert list(result.sample.input_ids[3:]) == truth(answer)
        assert [finding.rule for finding in result.findings] == ["server-end"]

    def test_missing_end_that_was_not_billed_is_only_noted(self, completion, truth, bill, rebuild):
        answer = bill(completion("Hi", reasoning="Hm"), extra=-1)
        result = rebuild(replace(answer, completion_token_ids=truth(answer)[:-1]))
        assert list(result.sample.input_ids[3:]) == truth(answer)[:-1]
        assert "server-end" in {finding.rule for finding in result.findings}

    def test_text_without_a_place_does_not_lose_the_ids(self, completion, truth, rebuild):
        ids = truth(completion("Hi"), "plain")
        result = rebuild(completion("Hi", reasoning="odd", ids=ids), mode="plain")
        assert list(result.sample.input_ids[3:]) == ids
        assert result.sample.delta is None
        assert [finding.rule for finding in result.findings] == ["drift"]

    def test_segments_of_tool_calls(self, family, completion, truth, bill, rebuild):
        answer = bill(completion("Hi", reasoning="Hm", calls=(("look", "{}"), ("add", "{}")), finish="tool_calls"))
        pieces = segment_ids(truth(answer), family.grammar, "thinking")
        assert {piece.kind for piece in pieces if piece.token is None} == {
            SegmentKind.REASONING,
            SegmentKind.CONTENT,
            SegmentKind.TOOL,
        }
        given_ids = replace(answer, completion_token_ids=truth(answer))
        assert rebuild(given_ids).sample.segments == rebuild(answer).sample.segments

    def test_segments_when_the_model_opens_its_reasoning(self, family, completion, truth):
        ids = truth(completion("Hi", reasoning="Hm"), "opening")
        kinds = [piece.kind for piece in segment_ids(ids, family.grammar, "opening") if piece.token is None]
        assert kinds == [SegmentKind.REASONING, SegmentKind.CONTENT]


@pytest.mark.parametrize(
    ("chosen", "rival", "positions"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], set()),
        ([1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 5, 6], {0}),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9], {5}),
        ([1, 2, 3, 4, 5, 6], [9, 1, 2, 3, 4, 5, 6], {0}),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9, 6], {5}),
        ([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6], {0}),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], {5}),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], set()),
        ([9, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6, 7], {0, 6}),
        (list(range(50)), list(range(100, 150)), set(range(50))),
    ],
)
def test_differing_positions(chosen, rival, positions):
    assert differing_positions(chosen, rival) == positions


@given(
    chosen=st.lists(st.integers(0, 5), max_size=30),
    rival=st.lists(st.integers(0, 5), max_size=30),
)
def test_positions_that_do_not_differ_can_be_found_in_the_rival(chosen, rival):
    kept = [token_id for index, token_id in enumerate(chosen) if index not in differing_positions(chosen, rival)]
    remaining = iter(rival)
    assert all(token_id in remaining for token_id in kept)


def test_a_shape_that_a_rival_habit_makes_needless_is_ambiguous(family, rebuild, bill, completion):
    """One count fits a missing close as well as a space too many: neither may be taken for sure."""
    encode = family.tokenizer.encode_ordinary
    assert len(encode(" Hm")) == len(encode("Hm")) + 1
    answer = bill(completion(reasoning=" Hm", calls=(("f", '{"a": 1}'),), finish="tool_calls"), extra=-1)
    assert rebuild(answer).sample.exactness is Exactness.COUNT_REPAIRED
    unsure = profile_with(rivals=[Habits(head_space="strip")])
    assert rebuild(answer, unsure).sample.exactness is Exactness.COUNT_AMBIGUOUS
