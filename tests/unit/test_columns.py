"""Columns built from buffers equal those that pyarrow makes."""

import subprocess
import sys
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.columns import column

CASES = [
    (pa.string(), st.text()),
    (pa.binary(), st.binary()),
    (pa.bool_(), st.booleans()),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.list_(pa.int32()), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)),
    (pa.decimal128(20, 12), st.decimals(min_value=-(10**7), max_value=10**7, places=12)),
]


@pytest.mark.parametrize(("kind", "strategy"), CASES, ids=[str(kind) for kind, _ in CASES])
def test_a_column_equals_pyarrows_own(kind, strategy):
    @given(st.lists(st.none() | strategy, max_size=20))
    def check(values):
        built = column(values, kind)
        built.validate(full=True)
        assert built.equals(pa.array(values, type=kind))
        assert built.null_count == values.count(None)

    check()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int32(), 2**31),
        (pa.decimal128(20, 12), Decimal("1e-13")),
        (pa.decimal128(20, 12), Decimal(10**9)),
    ],
)
def test_what_does_not_fit_is_refused(kind, value):
    with pytest.raises(ValueError, match="fit"):
        column([value], kind)


def test_writing_rows_imports_no_pandas(tmp_path):
    code = (
        "import sys; from pathlib import Path; from eagle3.formats import COMPLETIONS, write_rows\n"
        "some = {'string': 'a', 'binary': b'a', 'bool': True}\n"
        "row = {entry.name: None if entry.nullable else some.get(str(entry.type), 1) for entry in COMPLETIONS}\n"
        f"write_rows(Path({str(tmp_path / 'x.parquet')!r}), [row], COMPLETIONS)\n"
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
