"""Each way in which rebuilt ids can differ from true ones is told by its name."""

from dataclasses import replace

import pytest

from eagle3.records import Exactness, Segment, SegmentKind
from eagle3.tokens.ground_truth import Agreement, compare_with_truth


@pytest.fixture
def given(tiny_run):
    prompt = tiny_run.prompt("question")
    return tiny_run.sample(prompt, tiny_run.completion(prompt))


def changed(sample, ids, exactness=Exactness.COUNT_VERIFIED, masked=()):
    start = sample.num_prompt_tokens
    everything = [*sample.input_ids[:start], *ids]
    segments = [Segment(kind=SegmentKind.AMBIGUOUS, start=start + each, stop=start + each + 1) for each in masked]
    return replace(sample, input_ids=everything, exactness=exactness, segments=segments)


def test_each_kind_of_difference(given):
    true = list(given.input_ids[given.num_prompt_tokens :])
    other = [*true]
    other[2] += 1
    assert compare_with_truth(given, given) is Agreement.IDENTICAL
    assert compare_with_truth(changed(given, other), given) is Agreement.UNSEEN_SAME_LENGTH
    assert compare_with_truth(changed(given, [*true[:-1], 1, 2]), given) is Agreement.UNSEEN
    assert compare_with_truth(changed(given, other, masked=[2]), given) is Agreement.FLAGGED
    assert compare_with_truth(changed(given, other, Exactness.MISMATCH), given) is Agreement.FLAGGED
