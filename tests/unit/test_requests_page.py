"""docs/requests.md and the README name every variable and every setting that there is, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvct import request
from nvct.record import as_dict
from nvct.settings import CAPABILITIES, PARTS, Settings

TREE = Path(__file__).resolve().parent.parent.parent
PAGES = [TREE / "docs/requests.md", TREE / "README.md"]

# The names of variables in the text of the module that reads them.
VARIABLES = set(re.findall(r'"(NVIDIA_[A-Z_]+[A-Z]|CUDA_VERSION)"', Path(request.__file__).read_text()))


def rows(page: Path) -> list[str]:
    """The first cell of every row of every table."""
    return [line.split("|")[1].strip() for line in page.read_text().splitlines() if line.startswith("|")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_has_a_row(page: Path) -> None:
    told = [name for cell in rows(page) for name in re.findall(r"^`([a-z][a-z0-9_]*)`$", cell)]
    assert set(as_dict(Settings())) <= set(told)
    assert set(told) <= {*as_dict(Settings()), *CAPABILITIES, "none", "all"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_variable_is_told(page: Path) -> None:
    assert len(VARIABLES) > 10
    text = page.read_text().replace("NVIDIA_REQUIRE_*", "NVIDIA_REQUIRE_CUDA").replace("JETPACK*", "JETPACK")
    assert [name for name in sorted(VARIABLES) if f"`{name}`" not in text and name != "NVIDIA_REQUIRE_JETPACK"] == []


def test_every_part_is_told() -> None:
    (row,) = [line for line in PAGES[0].read_text().splitlines() if line.startswith("| `parts`")]
    assert [name for name in PARTS if f"`{name}`" not in row] == []
