"""Records survive their files; damaged and foreign files are refused; equal rows give equal bytes."""

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.artifacts import sha256_file
from eagle3.errors import CorruptShardError
from eagle3.formats import (
    COMPLETIONS,
    CORPUS,
    SCHEMAS,
    TOKEN_SAMPLES,
    completion_from_row,
    completion_to_row,
    corpus_loss_mask,
    corpus_row_to_sample,
    document,
    hidden_states_name,
    prompt_from_json,
    prompt_to_json,
    read_json_lines,
    read_rows,
    read_table,
    token_sample_from_row,
    token_sample_to_row,
    write_json_lines,
    write_rows,
)
from eagle3.records import (
    Completion,
    Exactness,
    PromptRecord,
    Segment,
    SegmentKind,
    TokenSample,
    ToolCall,
    Usage,
    loss_mask,
)

# A NUL-free, surrogate-free text still covers U+2028, U+0085 and everything else that line splitters trip over.
texts = st.text()
ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)

completions = st.builds(
    Completion,
    sample_id=texts,
    dataset=texts,
    reasoning=st.none() | texts,
    content=st.none() | texts,
    tool_calls=st.lists(st.builds(ToolCall, id=texts, name=texts, arguments=texts), max_size=2).map(tuple),
    finish_reason=texts,
    native_finish_reason=st.none() | texts,
    provider=texts,
    model=texts,
    quantization=st.none() | texts,
    generation_id=st.none() | texts,
    usage=st.builds(
        Usage,
        prompt_tokens=st.integers(0, 10**6),
        completion_tokens=st.integers(0, 10**6),
        reasoning_tokens=st.none() | st.integers(0, 10**6),
        cached_tokens=st.none() | st.integers(0, 10**6),
    ),
    cost_usd=st.decimals(0, 100, places=12),
    cost_is_estimated=st.booleans(),
    prompt_token_ids=st.none() | ids,
    completion_token_ids=st.none() | ids,
    latency_s=st.floats(0, 1e4),
    attempts=st.integers(1, 9),
    from_cache=st.booleans(),
    raw_body=st.binary(),
)

prompts = st.builds(
    PromptRecord,
    sample_id=texts,
    dataset=texts,
    prompt_id=texts,
    messages=st.lists(st.fixed_dictionaries({"role": texts, "content": st.none() | texts}), max_size=3).map(tuple),
    tools=st.lists(st.dictionaries(texts, st.none() | texts), max_size=2).map(tuple),
    replica=st.integers(0, 63),
)


@st.composite
def token_samples(draw: st.DrawFn) -> TokenSample:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    kinds = [SegmentKind.PROMPT, *draw(st.lists(st.sampled_from(SegmentKind), min_size=4, max_size=4))]
    stops = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    segments = tuple(
        Segment(kind=kind, start=stop - length, stop=stop)
        for kind, length, stop in zip(kinds, lengths, stops, strict=False)
    )
    return TokenSample(
        sample_id=draw(texts),
        dataset=draw(texts),
        input_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=stops[-1], max_size=stops[-1])),
        num_prompt_tokens=lengths[0],
        segments=segments,
        exactness=draw(st.sampled_from(Exactness)),
        delta=draw(st.none() | st.integers(-9, 9)),
        provider=draw(texts),
        model=draw(texts),
        finish_reason=draw(texts),
    )


@given(st.lists(completions, max_size=3))
def test_completions_survive_parquet(tmp_path_factory: pytest.TempPathFactory, written: list[Completion]):
    path = tmp_path_factory.mktemp("formats") / "shard.parquet"
    write_rows(path, list(map(completion_to_row, written)), COMPLETIONS)
    assert list(map(completion_from_row, read_rows(path, COMPLETIONS))) == written


@given(st.lists(token_samples(), max_size=3))
def test_token_samples_survive_parquet(tmp_path_factory: pytest.TempPathFactory, written: list[TokenSample]):
    path = tmp_path_factory.mktemp("formats") / "shard.parquet"
    write_rows(path, list(map(token_sample_to_row, written)), TOKEN_SAMPLES)
    assert list(map(token_sample_from_row, read_rows(path, TOKEN_SAMPLES))) == written


@given(st.lists(prompts, max_size=3))
def test_prompts_survive_json_lines(tmp_path_factory: pytest.TempPathFactory, written: list[PromptRecord]):
    path = tmp_path_factory.mktemp("formats") / "shard.jsonl"
    write_json_lines(path, map(prompt_to_json, written))
    assert [prompt_from_json(row) for row in read_json_lines(path)] == written


@given(token_samples())
def test_a_corpus_row_carries_loss_where_its_sample_does(sample: TokenSample):
    row = {name: token_sample_to_row(sample)[name] for name in CORPUS.names}
    assert corpus_loss_mask(row) == loss_mask(sample)
    assert len(corpus_loss_mask(row)) == len(sample.input_ids)
    restored = corpus_row_to_sample(row)
    assert (restored.segments, restored.exactness) == (sample.segments, sample.exactness)


def test_money_keeps_every_digit(tmp_path: Path):
    cost = Decimal("0.000000123457")
    row = {
        name: None if COMPLETIONS.field(name).nullable else _filler(COMPLETIONS.field(name).type)
        for name in COMPLETIONS.names
    }
    write_rows(tmp_path / "c.parquet", [{**row, "cost_usd": cost, "tool_calls": "[]"}], COMPLETIONS)
    assert read_rows(tmp_path / "c.parquet", COMPLETIONS)[0]["cost_usd"] == cost


def _filler(kind: pa.DataType) -> object:
    if pa.types.is_string(kind):
        return "x"
    if pa.types.is_binary(kind):
        return b""
    return (
        0
        if pa.types.is_integer(kind)
        else False
        if pa.types.is_boolean(kind)
        else Decimal(0)
        if pa.types.is_decimal(kind)
        else 0.0
    )


def sample(number: int = 0) -> TokenSample:
    return TokenSample(
        sample_id=f"s{number}",
        dataset="one",
        input_ids=list(range(40)),
        num_prompt_tokens=10,
        segments=(
            Segment(kind=SegmentKind.PROMPT, start=0, stop=10),
            Segment(kind=SegmentKind.CONTENT, start=10, stop=40),
        ),
        exactness=Exactness.EXACT_IDS,
        delta=0,
        provider="Acme",
        model="tiny",
        finish_reason="stop",
    )


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard.parquet"
    write_rows(path, [token_sample_to_row(sample(number)) for number in range(600)], TOKEN_SAMPLES)
    return path


def test_equal_rows_give_equal_bytes(shard: Path, tmp_path: Path):
    again = tmp_path / "again.parquet"
    write_rows(again, [token_sample_to_row(sample(number)) for number in range(600)], TOKEN_SAMPLES)
    assert sha256_file(again) == sha256_file(shard)


def test_files_are_compressed_in_small_groups_and_say_what_they_are(shard: Path):
    metadata = pq.read_metadata(shard)
    assert metadata.num_row_groups == 3
    assert metadata.metadata[b"eagle3.schema"] == b"eagle3.token_samples"
    place = TOKEN_SAMPLES.get_field_index("input_ids")
    column = metadata.row_group(0).column(place)
    assert column.compression == "ZSTD"
    assert "RLE_DICTIONARY" not in column.encodings


def test_some_columns_can_be_read_alone(shard: Path):
    table = read_table(shard, TOKEN_SAMPLES, ["sample_id", "exactness"])
    assert (table.column_names, table.num_rows) == (["sample_id", "exactness"], 600)


def test_damaged_missing_and_foreign_files_are_refused(shard: Path, tmp_path: Path):
    with pytest.raises(CorruptShardError, match=r"expected b'eagle3\.corpus'"):
        read_rows(shard, CORPUS)
    version = TOKEN_SAMPLES.with_metadata({**TOKEN_SAMPLES.metadata, b"eagle3.schema_version": b"99"})
    with pytest.raises(CorruptShardError, match="schema_version"):
        read_rows(shard, version)
    with pytest.raises(CorruptShardError, match="cannot be read"):
        read_rows(tmp_path / "missing.parquet", TOKEN_SAMPLES)
    data = bytearray(shard.read_bytes())
    data[200] ^= 0xFF
    (tmp_path / "flipped.parquet").write_bytes(data)
    with pytest.raises(CorruptShardError, match="cannot be read"):
        read_rows(tmp_path / "flipped.parquet", TOKEN_SAMPLES)
    (tmp_path / "cut.parquet").write_bytes(data[:1000])
    with pytest.raises(CorruptShardError, match="cannot be read"):
        read_rows(tmp_path / "cut.parquet", TOKEN_SAMPLES)


def test_damaged_json_lines_are_refused(tmp_path: Path):
    path = tmp_path / "shard.jsonl"
    for content, problem in ((b'{"a": 1}\n{"a"', "line 2 is not JSON"), (b"[1]\n", "line 1 is list")):
        path.write_bytes(content)
        with pytest.raises(CorruptShardError, match=problem):
            read_json_lines(path)
    with pytest.raises(CorruptShardError, match="has keys"):
        prompt_from_json({"sample_id": "s", "surprise": 1})


def test_every_column_is_documented():
    page = document()
    for schema in SCHEMAS.values():
        for field in schema:
            assert field.metadata[b"doc"]
            assert f"| `{field.name}` |" in page


def test_hidden_state_files_are_named_as_the_trainer_expects():
    assert hidden_states_name(12) == "hs_12.safetensors"
