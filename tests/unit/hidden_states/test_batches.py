from hypothesis import given
from hypothesis import strategies as st

from eagle3.hidden_states.backend import plan_batches


@given(st.lists(st.integers(1, 300)), st.integers(1, 500))
def test_every_sequence_is_in_one_batch_that_fits(lengths: list[int], batch_tokens: int) -> None:
    batches = plan_batches(lengths, batch_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= batch_tokens


@given(st.lists(st.integers(1, 300), min_size=1))
def test_longest_comes_first(lengths: list[int]) -> None:
    order = [lengths[index] for batch in plan_batches(lengths, 500) for index in batch]
    assert order == sorted(lengths, reverse=True)
