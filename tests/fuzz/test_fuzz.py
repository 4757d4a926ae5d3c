"""The fuzz targets in the test suite: some hundred inputs each, most of them good ones with a few bytes changed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import fuzz
from tests.fuzz.targets import TARGETS

# Bytes that lie at the borders of what parsers look for.
LETTERS = [bytes([letter]) for letter in b'\0\xff\n"\\{[,: 0']
TELLING = st.sampled_from([*LETTERS, b"\xff\xff\xff\xff", b"\\ud800"])


@st.composite
def damaged(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A seed with parts replaced, removed, doubled and cut off."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 8))
        part = draw(TELLING | st.binary(max_size=8) | st.just(data[start : start + 30]))
        data = data[:start] + part + data[start + length :]
    return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 0 else data


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(damaged(target.seeds) | st.binary(max_size=300))
    def holds(data: bytes) -> None:
        target.run(data)

    holds()


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_good(name: str) -> None:
    for seed in TARGETS[name].seeds:
        TARGETS[name].run(seed)


def test_the_fuzzer_names_its_targets() -> None:
    done = subprocess.run([sys.executable, fuzz.__file__, "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert all(name in done.stderr for name in TARGETS)
