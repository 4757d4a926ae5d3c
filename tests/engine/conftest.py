"""What tests of ordinary users' and other engines share: a node where everybody can reach it.

Modules that need another node have a fixture of their own by the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nodes import SimNode, dgx_a100, kept
from tests.support.userns import Hooks, public_folder


@pytest.fixture(scope="session")
def folder(root_user: None) -> Iterator[Path]:
    """A folder that every user can reach."""
    with public_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def node(folder: Path) -> Iterator[SimNode]:
    """A DGX A100 in it. Shared: a test must leave it as it was."""
    with kept(dgx_a100(folder / "node")) as node:
        yield node


@pytest.fixture
def hooks(folder: Path, node: SimNode) -> Iterator[Hooks]:
    with Hooks(folder, node) as hooks:
        yield hooks
