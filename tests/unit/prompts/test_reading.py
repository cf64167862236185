"""Prompt files: what is read, what is refused, and what the refusal says."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import InputError
from eagle3.prompts.reading import parse_conversation, read_conversations

USER = {"role": "user", "content": "hi"}


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def test_lines_end_at_the_newline_byte_alone(tmp_path: Path):
    text = "a\u2028b\u0085c\x0b\x0c\r\u2029d"
    path = write(
        tmp_path / "p.jsonl", dump({"messages": [{"role": "user", "content": text}]}), b"", dump({"messages": [USER]})
    )
    first, second = read_conversations(path)
    assert first.messages[0]["content"] == text
    assert (first.line, second.line) == (1, 3)
    assert (first.prompt_id, second.prompt_id) == ("line-1", "line-3")


@given(st.text().filter(lambda text: text.strip()))
def test_any_text_survives_reading(tmp_path_factory: pytest.TempPathFactory, text: str):
    path = tmp_path_factory.mktemp("any") / "p.jsonl"
    messages = [{"role": "user", "content": text}]
    path.write_bytes(json.dumps({"messages": messages}).encode() + b"\r\n" + dump({"messages": [USER]}))
    first, second = read_conversations(path)
    assert list(first.messages) == messages
    assert list(second.messages) == [USER]


def test_a_byte_order_mark_at_the_start_is_no_text(tmp_path: Path):
    path = write(tmp_path / "p.jsonl", b"\xef\xbb\xbf" + dump({"id": 7, "messages": [USER], "note": 1}))
    (conversation,) = read_conversations(path)
    assert conversation.prompt_id == "7"
    assert conversation.ignored_keys == {"note"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"messages": [', "one JSON object in UTF-8"),
        (b'{"messages": "\xff"}', "one JSON object in UTF-8"),
        (b'{"messages": NaN}', "NaN is no JSON"),
        (b"[1]", "an object with `messages`"),
        (b'{"prompt": "hi"}', "a key `messages`"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": {"role": "user"}}', "`messages` to be a list"),
        (b'{"messages": ["hi"]}', "`messages` to hold objects"),
        (b'{"messages": [{"content": "hi"}]}', "messages[0].role to be one of"),
        (b'{"messages": [{"role": "human", "content": "hi"}]}', "found str 'human'"),
        (b'{"messages": [{"role": ["user"], "content": "hi"}]}', "messages[0].role to be one of"),
        (b'{"messages": [{"role": "user"}]}', "messages[0].content to be a text"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "found int 5"),
        (b'{"messages": [{"role": "user", "content": [{"text": "hi"}]}]}', "to have a `type`"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "to have a `text`"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "tools": {}}', "`tools` to be a list"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "tools": "x"}', "`tools` to be a list"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "id": true}', "as `id`"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "id": "\\ud83d"}', "without halves of surrogate pairs"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "\\ud83d": 1}', "without halves of surrogate pairs"),
    ],
)
def test_wrong_shapes_name_file_line_expected_and_found(tmp_path: Path, line: bytes, expected: str):
    path = write(tmp_path / "prompts.jsonl", dump({"messages": [USER]}), line)
    with pytest.raises(InputError) as caught:
        list(read_conversations(path))
    message = str(caught.value)
    assert "'prompts.jsonl' line 2: expected" in message
    assert "found" in message
    assert expected in message


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
def test_empty_and_missing_files_are_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "p.jsonl"
    with pytest.raises(InputError, match="missing"):
        list(read_conversations(path))
    path.write_bytes(content)
    with pytest.raises(InputError, match="holds no prompt"):
        list(read_conversations(path))


def test_an_assistant_turn_may_be_tool_calls_alone():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "ok"}]
    assert len(parse_conversation({"messages": messages}, 1, "p").messages) == 3
    with pytest.raises(InputError):
        parse_conversation({"messages": [USER, {"role": "assistant", "content": None}]}, 1, "p")


def test_parquet_gives_the_same_conversations_without_its_nulls(tmp_path: Path):
    lines = [
        {"id": "a", "messages": [{"role": "user", "content": "hi"}]},
        {"id": "b", "messages": [{"role": "user", "content": "ho", "name": "Ann"}]},
    ]
    table = pa.Table.from_pylist(lines)
    assert table["messages"].type.value_type.num_fields == 3
    pq.write_table(table, tmp_path / "p.parquet")
    jsonl = write(tmp_path / "p.jsonl", *map(dump, lines))
    assert list(read_conversations(tmp_path / "p.parquet")) == list(read_conversations(jsonl))
    (tmp_path / "broken.parquet").write_bytes(b"no")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        list(read_conversations(tmp_path / "broken.parquet"))


def test_key_order_and_id_do_not_make_another_conversation():
    one = parse_conversation({"id": "a", "messages": [{"role": "user", "content": "hi"}]}, 1, "p")
    same = parse_conversation({"messages": [{"content": "hi", "role": "user"}], "tools": []}, 2, "p")
    other = parse_conversation({"messages": [{"role": "user", "content": "hi "}]}, 3, "p")
    assert one.key == same.key != other.key
