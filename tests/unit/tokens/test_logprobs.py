"""Ids out of logprobs: taken when the tokens spell the answer, whatever the usual encoding would be."""

from dataclasses import replace

import pytest

from eagle3.providers.wire import parse_reply
from eagle3.records import Exactness
from eagle3.tokens.reconstruct import reconstruct
from tests.unit.tokens.test_raw_tools import profile


@pytest.fixture
def rebuild(family):
    def run(answer, mode="thinking"):
        return reconstruct(answer, [1], family.grammar, family.tokenizer, profile(), mode=mode)

    return run


@pytest.fixture
def seen(family, completion):
    """An answer whose content the model wrote letter by letter, with the bytes of its tokens."""

    def make(*, reasoning, lists_reasoning=True, lists_end=True, mode="thinking"):
        encode, control = family.tokenizer.encode_ordinary, family.grammar.control
        letters = [token_id for letter in "answer" for token_id in encode(letter)]
        thought = [*encode(reasoning or ""), control["think_close"].id] if mode == "thinking" else []
        ids = [*thought, *letters, control["end"].id]
        assert ids != [*thought, *encode("answer"), control["end"].id]
        listed = ids if lists_reasoning else letters
        listed = listed if lists_end or not lists_reasoning else listed[:-1]
        answer = completion("answer", reasoning=reasoning, billed=len(ids))
        token_bytes = tuple(family.tokenizer.decode_bytes([token_id]) for token_id in listed)
        return replace(answer, token_bytes=token_bytes), ids

    return make


@pytest.mark.parametrize("lists_end", [True, False])
def test_all_tokens_listed(seen, rebuild, lists_end):
    answer, ids = seen(reasoning="Hm", lists_end=lists_end)
    result = rebuild(answer)
    assert list(result.sample.input_ids[1:]) == ids
    assert (result.sample.exactness, result.sample.delta) == (Exactness.EXACT_LOGPROBS, 0)


def test_content_alone_is_enough_where_there_is_no_other_text(seen, rebuild):
    answer, ids = seen(reasoning=None, lists_reasoning=False, mode="plain")
    sample = rebuild(answer, "plain").sample
    assert list(sample.input_ids[1:]) == ids
    assert sample.exactness is Exactness.EXACT_LOGPROBS


def test_content_alone_does_not_prove_the_reasoning(seen, rebuild):
    answer, _ = seen(reasoning="Hm", lists_reasoning=False)
    result = rebuild(answer)
    assert result.sample.exactness is Exactness.MISMATCH
    assert [finding.rule for finding in result.findings] == ["logprobs"]


@pytest.mark.parametrize("token_bytes", [(b"other",), (b"\xef\xbf\xbd",), (b"no such token",)])
def test_tokens_that_do_not_spell_the_answer_are_not_taken(completion, truth, rebuild, token_bytes):
    answer = completion("Hi", reasoning="Hm")
    usage = answer.usage._replace(completion_tokens=len(truth(answer)))
    result = rebuild(replace(answer, usage=usage, token_bytes=token_bytes))
    assert result.sample.exactness is Exactness.COUNT_VERIFIED
    assert [finding.rule for finding in result.findings] == ["logprobs"]


def test_a_count_that_contradicts_is_not_overruled(seen, rebuild):
    answer, _ = seen(reasoning="Hm")
    wrong = replace(answer, usage=answer.usage._replace(completion_tokens=answer.usage.completion_tokens + 3))
    assert rebuild(wrong).sample.exactness is Exactness.MISMATCH


def test_bytes_are_read_from_replies():
    def body(entries):
        return (
            b'{"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop", "logprobs": {"content": ['
            + entries
            + b"]}}]}"
        )

    whole = parse_reply(body(b'{"token": "Hi", "bytes": [72, 105], "logprob": -0.1}')).answer
    assert whole is not None
    assert whole.token_bytes == (b"Hi",)
    for entries in (b'{"token": "Hi", "bytes": null}', b'{"token": "Hi", "bytes": [300]}', b""):
        answer = parse_reply(body(entries)).answer
        assert answer is not None
        assert answer.token_bytes is None


@pytest.mark.parametrize("listing", ["replaced", "nothing", "whole character last"])
def test_tokens_that_are_no_utf8_by_themselves_are_encoded_anew(family, completion, rebuild, listing):
    """Four byte tokens make one emoji; servers that list decoded text lose them."""
    encode, control = family.tokenizer.encode_ordinary, family.grammar.control
    before, emoji, after = encode("Hello"), encode("🌍"), encode(" again")
    assert len(emoji) == 4
    lost = {
        "replaced": ["\ufffd".encode()] * 4,
        "nothing": [b""] * 4,
        "whole character last": [b"", b"", b"", "🌍".encode()],
    }[listing]

    def listed(ids):
        return [family.tokenizer.decode_bytes([token_id]) for token_id in ids]

    thought = [*encode("Hm"), control["think_close"].id]
    ids = [*thought, *before, *emoji, *after, control["end"].id]
    token_bytes = (*listed(thought), *listed(before), *lost, *listed(after), *listed(ids[-1:]))
    answer = replace(completion("Hello🌍 again", reasoning="Hm", billed=len(ids)), token_bytes=token_bytes)
    result = rebuild(answer)
    assert list(result.sample.input_ids[1:]) == ids
    assert result.sample.exactness is Exactness.COUNT_REPAIRED
    assert "4 tokens came without bytes" in result.findings[0].detail
    assert rebuild(replace(answer, token_bytes=token_bytes[:-3])).sample.exactness is not Exactness.COUNT_REPAIRED


def test_a_replacement_character_of_the_models_own_is_no_loss(family, completion, rebuild):
    encode, control = family.tokenizer.encode_ordinary, family.grammar.control
    ids = [control["think_close"].id, *encode("a\ufffdb"), control["end"].id]
    token_bytes = tuple(family.tokenizer.decode_bytes([token_id]) for token_id in ids)
    answer = replace(completion("a\ufffdb", billed=len(ids)), token_bytes=token_bytes)
    result = rebuild(answer)
    assert list(result.sample.input_ids[1:]) == ids
    assert result.sample.exactness is Exactness.EXACT_LOGPROBS
