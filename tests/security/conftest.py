"""What the tests of the security rules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.canary import Canary


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    canary = Canary(tmp_path / "canary")
    yield canary
    canary.close()
