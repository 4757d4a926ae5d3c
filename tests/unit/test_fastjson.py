"""The JSON scanner on its own: it gives what `json.loads` gives, in a process that has never imported `json`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvct import fastjson

TREE = Path(__file__).resolve().parent.parent.parent

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(VALUES, st.sampled_from([None, 2]))
def test_it_reads_what_json_writes(value: object, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert fastjson.loads(text) == json.loads(text) == value


@given(st.text(max_size=20))
def test_it_refuses_what_json_refuses(text: str) -> None:
    try:
        expected = json.loads(text, strict=False)
    except ValueError:
        with pytest.raises(ValueError):
            fastjson.loads(text)
    else:
        assert repr(fastjson.loads(text)) == repr(expected)


@pytest.mark.parametrize("text", ["1e400", "-1e400", "NaN", "Infinity"])
def test_it_writes_no_number_that_json_has_not(text: str) -> None:
    with pytest.raises(ValueError):
        fastjson.dumps({"zz": [fastjson.loads(text)]})


@given(VALUES)
def test_what_it_writes_is_read_as_the_same(value: object) -> None:
    try:
        text = fastjson.dumps(value)
    except ValueError:
        assert "Infinity" in json.dumps(value)
    else:
        assert fastjson.loads(text) == json.loads(text) == value


BAD = ["", " ", "{", '{"a": "x', "[1, 2", '{"a" 1}', "nul", '{"a": 1} x', "[1,]", '"\\u12"', "{1: 2}"]


def test_it_refuses_bad_text_where_json_was_never_imported() -> None:
    """The C scanner raises SystemError there, for it wants an exception class out of `json.decoder`."""
    script = f"""
import sys
sys.path.insert(0, {str(TREE)!r})
from nvct import fastjson
for text in {BAD!r}:
    try:
        fastjson.loads(text)
    except ValueError:
        continue
    sys.exit(f"{{text!r}} was read")
sys.exit("json was imported" if "json" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
