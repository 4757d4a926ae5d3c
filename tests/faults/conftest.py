"""What the tests of failures share: a count of the trials, told at the end of the run, and a seed for all chance."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Mapping

import pytest

_COUNTS = pytest.StashKey[Counter[str]]()
_SEED = pytest.StashKey[int]()


class Tally:
    """Counts trials by their outcome, over all tests of a run."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def add(self, outcomes: Mapping[str, int]) -> None:
        self._counts.update(outcomes)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_COUNTS] = Counter()
    config.stash[_SEED] = int(os.environ.get("NVCT_FAULTS_SEED") or random.SystemRandom().randrange(1 << 31))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash[_COUNTS]
    if counts:
        told = ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
        seed = config.stash[_SEED]
        terminalreporter.write_line(
            f"faults: {counts.total()} trials: {told}; NVCT_FAULTS_SEED={seed} chooses the same ones again"
        )


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    return Tally(pytestconfig.stash[_COUNTS])


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Another one in each run, or NVCT_FAULTS_SEED; the last line of the run tells it."""
    return pytestconfig.stash[_SEED]


@pytest.fixture(scope="session")
def strace(root_user: None) -> str:
    program = shutil.which("strace")
    if not program:
        pytest.skip("strace is not installed: run tools/setup.sh")
    return program
