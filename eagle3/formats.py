"""File formats: Arrow schemas, safetensors keys, and the code between records and columns.

This module is the specification; docs/formats.md is generated from it by `python -m eagle3.formats`. It opens no files
except in its `read_…` and `write_…` functions, which work on a path they are given.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3.columns import column
from eagle3.errors import CorruptShardError
from eagle3.records import (
    Completion,
    Exactness,
    JsonObject,
    PromptRecord,
    Segment,
    SegmentKind,
    TokenSample,
    ToolCall,
    Usage,
    loss_mask,
)

ROW_GROUP_SAMPLES = 256
"""Small enough that one sample is read without reading thousands, large enough to compress."""


def _field(name: str, kind: pa.DataType, doc: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"doc": doc})


def _schema(name: str, version: int, fields: Sequence[pa.Field]) -> pa.Schema:
    return pa.schema(list(fields), metadata={"eagle3.schema": name, "eagle3.schema_version": str(version)})


_IDS = pa.list_(pa.field("item", pa.int32(), nullable=False))
_SEGMENTS = pa.list_(
    pa.field(
        "item",
        pa.struct(
            [
                pa.field("kind", pa.string(), nullable=False),
                pa.field("start", pa.int32(), nullable=False),
                pa.field("stop", pa.int32(), nullable=False),
            ]
        ),
        nullable=False,
    )
)

COMPLETIONS = _schema(
    "eagle3.completions",
    1,
    [
        _field("sample_id", pa.string(), "Identity of the sample through the whole run."),
        _field("dataset", pa.string(), "Dataset of the recipe."),
        _field("reasoning", pa.string(), "Text before the close of thinking, untouched.", nullable=True),
        _field("content", pa.string(), "Answer text, untouched.", nullable=True),
        _field("tool_calls", pa.string(), "JSON list of {id, name, arguments}, verbatim."),
        _field("finish_reason", pa.string(), "As normalised by the provider."),
        _field("native_finish_reason", pa.string(), "As the engine named it.", nullable=True),
        _field("provider", pa.string(), "Who answered."),
        _field("model", pa.string(), "Model id named in the reply."),
        _field("quantization", pa.string(), "As listed for the endpoint.", nullable=True),
        _field("generation_id", pa.string(), "The provider's id of the answer.", nullable=True),
        _field("usage", pa.string(), "JSON object with billed token counts."),
        _field("cost_usd", pa.decimal128(20, 12), "What the account paid, US dollars."),
        _field("cost_is_estimated", pa.bool_(), "True when the reply named no cost."),
        _field("prompt_token_ids", _IDS, "Native prompt ids when given.", nullable=True),
        _field("completion_token_ids", _IDS, "Native completion ids when given.", nullable=True),
        _field("latency_s", pa.float64(), "Seconds from first byte sent to last byte read."),
        _field("attempts", pa.int32(), "Requests sent, rate-limit refusals not counted."),
        _field("from_cache", pa.bool_(), "True when served from the response cache."),
        _field("raw_body", pa.binary(), "The reply exactly as received."),
    ],
)
"""2-completions/<dataset>/shard-*.parquet: one row per finished answer, in prompt order."""

TOKEN_SAMPLES = _schema(
    "eagle3.token_samples",
    1,
    [
        _field("sample_id", pa.string(), "Identity of the sample through the whole run."),
        _field("dataset", pa.string(), "Dataset of the recipe."),
        _field("input_ids", _IDS, "Prompt and completion ids of the target, length T."),
        _field("num_prompt_tokens", pa.int32(), "The first ids that are prompt."),
        _field("segments", _SEGMENTS, "What each stretch is; the stretches tile [0, T)."),
        _field("exactness", pa.string(), "How surely the ids are the model's own."),
        _field("delta", pa.int32(), "Rebuilt minus billed completion tokens under the profile.", nullable=True),
        _field("provider", pa.string(), "Who answered."),
        _field("model", pa.string(), "Model id named in the reply."),
        _field("finish_reason", pa.string(), "Why generation ended."),
    ],
)
"""3-token-samples/<dataset>/shard-*.parquet: one row per completion, in prompt order."""

CORPUS = _schema(
    "eagle3.corpus",
    1,
    [
        _field("sample_id", pa.string(), "Identity of the sample through the whole run."),
        _field("dataset", pa.string(), "Dataset of the recipe."),
        _field("input_ids", _IDS, "Prompt and completion ids of the target, length T."),
        _field("num_prompt_tokens", pa.int32(), "The first ids that are prompt."),
        _field("segments", _SEGMENTS, "What each stretch is; loss falls on all but `prompt` and `ambiguous`."),
        _field("exactness", pa.string(), "How surely the ids are the model's own."),
        _field("provider", pa.string(), "Who answered."),
        _field("finish_reason", pa.string(), "Why generation ended."),
    ],
)
"""5-corpus/{train,validation}/shard-*.parquet: shuffled rows; row order is that of the hidden states."""

_FINDINGS = pa.list_(
    pa.field(
        "item",
        pa.struct([pa.field(name, pa.string(), nullable=False) for name in ("rule", "severity", "detail")]),
        nullable=False,
    )
)

FILE_SAMPLES = _schema(
    "eagle3.file_samples",
    1,
    [
        _field("line", pa.int32(), "Line of the reply file, from 1; blank lines are counted and have no row."),
        _field("provider", pa.string(), "Who answered; `unknown` when neither line nor reply says."),
        _field("model", pa.string(), "Model asked for; `unknown` when the line does not say."),
        _field("grammar", pa.string(), "Response grammar the line was read by."),
        _field("mode", pa.string(), "Mode of the grammar; empty for a line that could not be read."),
        _field("finish_reason", pa.string(), "As in the reply; `missing` when it has none."),
        _field("input_ids", _IDS, "Prompt and completion ids, length T; empty for a line that could not be read."),
        _field("num_prompt_tokens", pa.int32(), "The first ids that are prompt; 0 when it could not be rendered."),
        _field("segments", _SEGMENTS, "What each stretch is; the stretches tile [0, T)."),
        _field("billed_prompt_tokens", pa.int32(), "As billed.", nullable=True),
        _field("billed_completion_tokens", pa.int32(), "As billed.", nullable=True),
        _field("delta", pa.int32(), "Rebuilt minus billed completion tokens under the profile.", nullable=True),
        _field("exactness", pa.string(), "How surely the ids are the model's own; `mismatch` when there are none."),
        _field("findings", _FINDINGS, "What was noticed on this line."),
    ],
)
"""Output of `eagle3 reconstruct-file`: one row per line of the reply file, in order."""

SCHEMAS: Mapping[str, pa.Schema] = {
    "2-completions/<dataset>/shard-*.parquet": COMPLETIONS,
    "3-token-samples/<dataset>/shard-*.parquet": TOKEN_SAMPLES,
    "5-corpus/{train,validation}/shard-*.parquet": CORPUS,
    "OUT.parquet of eagle3 reconstruct-file": FILE_SAMPLES,
}

HIDDEN_STATES_KEY = "hidden_states"
"""Tensor [T, L+1, H]: the captured layer inputs in ascending layer order, then the state before the final norm."""
TOKEN_IDS_KEY = "token_ids"
"""Tensor int64 [T]: the ids that the states belong to."""
CONTRACT_KEY = "eagle3.capture_contract"
"""safetensors header entry: the capture contract as canonical JSON."""


def hidden_states_name(row: int) -> str:
    """Return the file name of one sample's hidden states; `row` counts train rows first, then validation rows."""
    return f"hs_{row}.safetensors"


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Write rows as Parquet: plain ids under zstd, page checksums, equal bytes for equal rows.

    Only one row group is in memory at a time, when `rows` is an iterator.
    """
    with _writer(path, schema) as writer:
        remaining = iter(rows)
        while group := list(itertools.islice(remaining, ROW_GROUP_SAMPLES)):
            arrays = [column([row.get(field.name) for row in group], field.type) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            del group, arrays
    pa.default_memory_pool().release_unused()  # Arrow would keep the largest group's memory for good


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table of one of the schemas above as `write_rows` does."""
    with _writer(path, table.schema) as writer:
        writer.write_table(table, row_group_size=ROW_GROUP_SAMPLES)


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    strings = [entry.name for entry in schema if pa.types.is_string(entry.type)]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=cast("Any", strings),
        write_page_checksum=True,
    )


def read_rows(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    """Read all rows of a Parquet file of the given schema.

    Raises:
        CorruptShardError: The file is damaged, or of another schema or version.
    """
    return cast("list[dict[str, Any]]", read_table(path, schema).to_pylist())


def read_table(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet file of the given schema, or some of its columns, as an Arrow table: 4 bytes an id in memory.

    Raises:
        CorruptShardError: The file is damaged, or of another schema or version.
    """
    wanted = schema.metadata or {}
    try:
        chosen = None if columns is None else list(columns)
        table = pq.read_table(path, columns=chosen, page_checksum_verification=True)
    except (OSError, pa.ArrowInvalid) as exc:
        raise CorruptShardError(
            f"{path.name!r} cannot be read as Parquet: {exc}. Restore it or redo its stage."
        ) from exc
    have = table.schema.metadata or {}
    for key in (b"eagle3.schema", b"eagle3.schema_version"):
        if have.get(key) != wanted.get(key):
            message = (
                f"{path.name!r} has {key.decode()} {have.get(key)!r}, expected {wanted.get(key)!r}: "
                "it is not a file of this stage or of this version. Redo its stage."
            )
            raise CorruptShardError(message)
    return table


def prompt_to_json(record: PromptRecord) -> JsonObject:
    """Return the JSON object of a prompt; one line of `1-prompts/<dataset>/shard-*.jsonl`."""
    return {
        "sample_id": record.sample_id,
        "dataset": record.dataset,
        "prompt_id": record.prompt_id,
        "messages": list(record.messages),
        "tools": list(record.tools),
        "replica": record.replica,
    }


def prompt_from_json(values: Mapping[str, Any]) -> PromptRecord:
    """Return the prompt of a JSON object made by `prompt_to_json`, with or without `num_prompt_tokens` beside it.

    Raises:
        CorruptShardError: Keys are missing or unknown.
    """
    try:
        members = {name: value for name, value in values.items() if name != "num_prompt_tokens"}
        members["messages"], members["tools"] = tuple(members["messages"]), tuple(members.get("tools", ()))
        return PromptRecord(**members)
    except (KeyError, TypeError) as exc:
        message = f"a prompt record has keys {sorted(values)}: {exc!r}. Redo the prompts stage."
        raise CorruptShardError(message) from exc


def read_json_lines(path: Path) -> list[JsonObject]:
    """Read a committed JSON Lines file; lines end at the newline byte alone, never at U+2028 or U+0085.

    Raises:
        CorruptShardError: A line is no JSON object.
    """
    rows: list[JsonObject] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            value: object = json.loads(line)
        except ValueError as exc:
            raise CorruptShardError(f"{path.name!r} line {number} is not JSON: {exc}. Redo its stage.") from exc
        if not isinstance(value, dict):
            raise CorruptShardError(f"{path.name!r} line {number} is {type(value).__name__}, expected an object.")
        rows.append(cast("JsonObject", value))
    return rows


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON Lines: UTF-8, no ASCII escapes, one newline byte after each object, equal bytes for equal rows."""
    with path.open("wb") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def completion_to_row(completion: Completion) -> dict[str, Any]:
    """Return the Parquet row of a completion."""
    return {
        **{name: getattr(completion, name) for name in COMPLETIONS.names if name not in ("tool_calls", "usage")},
        "tool_calls": json.dumps(
            [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in completion.tool_calls],
            ensure_ascii=False,
        ),
        "usage": json.dumps(completion.usage._asdict()),
    }


def completion_from_row(row: Mapping[str, Any]) -> Completion:
    """Return the completion of a Parquet row."""
    values = dict(row)
    values["tool_calls"] = tuple(ToolCall(**call) for call in json.loads(row["tool_calls"]))
    values["usage"] = Usage(**json.loads(row["usage"]))
    values["cost_usd"] = Decimal(row["cost_usd"])
    return Completion(**values)


def token_sample_to_row(sample: TokenSample) -> dict[str, Any]:
    """Return the Parquet row of a token sample."""
    return {
        **{name: getattr(sample, name) for name in TOKEN_SAMPLES.names if name != "segments"},
        "exactness": sample.exactness.value,
        "segments": [
            {"kind": segment.kind.value, "start": segment.start, "stop": segment.stop} for segment in sample.segments
        ],
    }


def token_sample_from_row(row: Mapping[str, Any]) -> TokenSample:
    """Return the token sample of a Parquet row."""
    values = dict(row)
    values["segments"] = segments_from_row(row)
    values["exactness"] = Exactness(row["exactness"])
    return TokenSample(**values)


def segments_from_row(row: Mapping[str, Any]) -> tuple[Segment, ...]:
    """Return the segments of a token-sample or corpus row."""
    return tuple(
        Segment(kind=SegmentKind(entry["kind"]), start=entry["start"], stop=entry["stop"]) for entry in row["segments"]
    )


def corpus_row_to_sample(row: Mapping[str, Any]) -> TokenSample:
    """Return a corpus row as a token sample; model and delta stay behind in the token samples."""
    return TokenSample(
        sample_id=row["sample_id"],
        dataset=row["dataset"],
        input_ids=row["input_ids"],
        num_prompt_tokens=row["num_prompt_tokens"],
        segments=segments_from_row(row),
        exactness=Exactness(row["exactness"]),
        delta=None,
        provider=row["provider"],
        model="",
        finish_reason=row["finish_reason"],
    )


def corpus_loss_mask(row: Mapping[str, Any]) -> list[bool]:
    """Return which ids of a corpus row carry loss, length T."""
    return loss_mask(corpus_row_to_sample(row))


def document() -> str:
    """Return the format documentation, generated from the schemas above."""
    lines = [
        "# File formats",
        "",
        "Generated by `python -m eagle3.formats`; edit `eagle3/formats.py` instead.",
        "Times are UTC, money is decimal US dollars, ids are int32 in files and int64 in safetensors.",
    ]
    for place, schema in SCHEMAS.items():
        metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        lines += [
            "",
            f"## `{place}`",
            "",
            f"Parquet, schema `{metadata['eagle3.schema']}` version {metadata['eagle3.schema_version']}.",
            "",
            "| column | type | null | meaning |",
            "|---|---|---|---|",
        ]
        for entry in schema:
            doc = (entry.metadata or {}).get(b"doc", b"").decode()
            kind = str(entry.type).replace("|", "\\|")
            lines.append(f"| `{entry.name}` | `{kind}` | {'yes' if entry.nullable else 'no'} | {doc} |")
    lines += [
        "",
        "## `6-hidden-states/hs_<row>.safetensors`",
        "",
        "One file per corpus row, train rows first, then validation rows; readable by the `speculators` trainer as is.",
        "",
        "| key | shape | meaning |",
        "|---|---|---|",
        f"| `{HIDDEN_STATES_KEY}` | `[T, L+1, H]` | layer inputs, ascending, then the state before the final norm |",
        f"| `{TOKEN_IDS_KEY}` | `[T]` int64 | the ids the states belong to |",
        f"| header `{CONTRACT_KEY}` | JSON | layer ids, order, norm state, dtype, target and tokenizer digests |",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(document())  # noqa: T201 - this module's command line is its documentation
