"""Laws of choosing, splitting and ordering."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.corpus.selection import Candidate, capped, hold_out, proportional_quota, row_order, select
from eagle3.recipe import Corpus
from eagle3.records import Exactness

SETTINGS = Corpus(max_sample_tokens=100, validation_samples=3)


def candidate(number: int, **values) -> Candidate:
    fields = {
        "sample_id": f"s{number}",
        "dataset": "one",
        "prompt_key": f"p{number}",
        "num_tokens": 30,
        "num_completion_tokens": 20,
        "exactness": Exactness.COUNT_VERIFIED,
    }
    return Candidate(**{**fields, **values})


candidates = st.lists(
    st.builds(
        Candidate,
        sample_id=st.text("abcdef0123456789", min_size=1, max_size=8),
        dataset=st.sampled_from(["code", "chat", "maths"]),
        prompt_key=st.sampled_from([f"p{number}" for number in range(12)]),
        num_tokens=st.integers(1, 120),
        num_completion_tokens=st.integers(1, 60),
        exactness=st.sampled_from(Exactness),
    ),
    max_size=40,
    unique_by=lambda each: each.sample_id,
)


@given(st.lists(st.text(), unique=True), st.integers())
def test_row_order_is_a_permutation(sample_ids: list[str], seed: int):
    assert sorted(row_order(sample_ids, seed)) == list(range(len(sample_ids)))


@given(st.lists(st.text(), unique=True), st.integers(), st.randoms())
def test_the_shuffled_order_does_not_depend_on_the_order_of_the_input(sample_ids: list[str], seed: int, random):
    shuffled = list(sample_ids)
    random.shuffle(shuffled)
    in_order = [sample_ids[index] for index in row_order(sample_ids, seed)]
    assert in_order == [shuffled[index] for index in row_order(shuffled, seed)]


def test_seeds_give_different_orders():
    names = [str(number) for number in range(100)]
    assert row_order(names, 0) != row_order(names, 1)
    assert row_order(names, 0) != list(range(100))


@given(candidates, st.integers(0, 3), st.integers(1, 30), st.one_of(st.none(), st.integers(1, 200)), st.randoms())
def test_select_partitions_the_samples_whatever_their_order(found: list[Candidate], seed, held, cap, random):
    settings = Corpus(max_sample_tokens=100, validation_samples=held, max_dataset_completion_tokens=cap)
    selection = select(found, settings, {}, seed)
    parts = [*selection.train, *selection.validation, *selection.left_out]
    assert sorted(parts) == sorted(each.sample_id for each in found)
    shuffled = list(found)
    random.shuffle(shuffled)
    again = select(shuffled, settings, {}, seed)
    assert (again.train, again.validation) == (selection.train, selection.validation)
    assert dict(again.left_out) == dict(selection.left_out)


@given(candidates, st.integers(0, 3), st.integers(1, 30))
def test_no_prompt_is_on_both_sides_and_training_keeps_half(found: list[Candidate], seed: int, held: int):
    selection = select(found, Corpus(max_sample_tokens=100, validation_samples=held), {}, seed)
    key = {each.sample_id: each.prompt_key for each in found}
    assert not {key[name] for name in selection.train} & {key[name] for name in selection.validation}
    assert len(selection.validation) <= held
    assert len(selection.train) >= len(selection.validation)


@given(st.integers(2, 60), st.integers(1, 80), st.integers(0, 5))
def test_with_one_answer_per_prompt_the_number_held_out_is_exact(total: int, wanted: int, seed: int):
    found = [candidate(number, dataset="abc"[number % 3]) for number in range(total)]
    assert len(hold_out(found, wanted, seed)) == min(wanted, total // 2)


def test_datasets_are_held_out_in_proportion():
    sizes = {"code": 60, "chat": 30, "maths": 10}
    found = [candidate(hash_of(name, number), dataset=name) for name, size in sizes.items() for number in range(size)]
    held = hold_out(found, 10, seed=0)
    assert Counter(each.dataset for each in found if each.sample_id in held) == {"code": 6, "chat": 3, "maths": 1}


def hash_of(name: str, number: int) -> int:
    return {"code": 0, "chat": 1000, "maths": 2000}[name] + number


@given(st.dictionaries(st.text(min_size=1), st.integers(1, 1000), min_size=1), st.data())
def test_quotas_add_up_and_stay_near_their_share(sizes: dict[str, int], data: st.DataObject):
    everything = sum(sizes.values())
    total = data.draw(st.integers(0, everything))
    quota = proportional_quota(sizes, total)
    assert sum(quota.values()) == total
    assert all(abs(quota[name] - total * size / everything) < 1 for name, size in sizes.items())


def test_replicas_stay_together():
    found = [candidate(number, prompt_key=f"p{number // 4}") for number in range(40)]
    held = hold_out(found, 8, seed=1)
    assert len(held) == 8
    assert len({each.prompt_key for each in found if each.sample_id in held}) == 2
    assert len(hold_out(found, 7, seed=1)) == 4
    assert hold_out(found, 3, seed=1) == frozenset()
    assert hold_out(found[:4], 8, seed=1) == frozenset()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"exactness": Exactness.UNVERIFIED}, "exactness:unverified"),
        ({"exactness": Exactness.MISMATCH}, "exactness:mismatch"),
        ({"num_tokens": 101}, "too_long"),
        ({"sample_id": "bad"}, "audit:A10"),
    ],
)
def test_unfit_samples_are_left_out_with_their_reason(change: dict, reason: str):
    found = [*(candidate(number) for number in range(5)), candidate(5, **change)]
    selection = select(found, SETTINGS, {"bad": "A10"}, 0)
    assert list(selection.left_out.values()) == [reason]


def test_limits_are_inclusive():
    found = [
        *(candidate(number) for number in range(5)),
        candidate(6, num_tokens=100, exactness=Exactness.COUNT_AMBIGUOUS),
        candidate(7, exactness=Exactness.EXACT_IDS),
    ]
    assert select(found, SETTINGS, {}, 0).left_out == {}
    strict = SETTINGS.model_copy(update={"min_exactness": "count_verified"})
    assert select(found, strict, {}, 0).left_out == {"s6": "exactness:count_ambiguous"}


@given(candidates, st.integers(1, 300), st.integers(0, 3))
def test_the_cap_holds_for_each_dataset(found: list[Candidate], cap: int, seed: int):
    kept = capped(found, cap, seed)
    for dataset in ("code", "chat", "maths"):
        mine = [each for each in found if each.dataset == dataset]
        assert _tokens(mine, kept) <= cap
        if sum(each.num_completion_tokens for each in mine) <= cap:
            assert {each.sample_id for each in mine} <= kept


def test_the_cap_does_not_favour_short_answers():
    found = [candidate(number, num_completion_tokens=1 if number % 2 else 99) for number in range(400)]
    kept = capped(found, 10_000, seed=0)
    short = sum(number % 2 for number in range(400) if f"s{number}" in kept)
    assert 0.4 < short / len(kept) < 0.6


def test_a_cap_is_its_own_reason():
    settings = SETTINGS.model_copy(update={"max_dataset_completion_tokens": 100})
    selection = select([candidate(number) for number in range(9)], settings, {}, 0)
    assert Counter(selection.left_out.values()) == {"dataset_cap": 4}
    assert len(selection.train) + len(selection.validation) == 5


def _tokens(found: Sequence[Candidate], kept: frozenset[str]) -> int:
    return sum(each.num_completion_tokens for each in found if each.sample_id in kept)
