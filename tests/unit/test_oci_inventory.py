"""Which inventory a hook takes when the kept one has turned out to be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from node_tree import VERSION

from nvct import settings
from nvct.model import Inventory, Roots
from nvct.node import cache
from nvct.node.saved import inventory_to_json
from nvct.oci import inventory as oci_inventory
from nvct.settings import Settings

CONFIG = "/etc/nvct/config.yaml"


def inventory(major: int) -> Inventory:
    return Inventory(VERSION, "12.4", "x86_64", Roots(), {"nvidia": major})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the discovery was asked for; it answers with major 3."""
    asked = []

    def answer(_config: str, which: str) -> dict[str, object]:
        asked.append(which)
        return {
            "settings": settings.to_json(Settings()),
            "inventory": inventory_to_json(inventory(3)),
            "warnings": [],
        }

    monkeypatch.setattr(oci_inventory, "_ask", answer)
    monkeypatch.setattr(cache, "own_run_dir", lambda: str(tmp_path))
    return asked


@pytest.mark.parametrize(
    ("wrong", "kept", "wanted", "told"),
    [
        (None, None, ["any"], 3),
        (None, 2, [], 2),
        (1, 1, ["new"], 3),
        (1, 2, [], 2),
        (1, None, ["any"], 3),
    ],
    ids=[
        "nothing-known",
        "known-meanwhile",
        "wrong",
        "another-start-was-first",
        "another-start-was-first-and-it-changed-again",
    ],
)
def test_only_the_inventory_that_was_wrong_is_replaced(
    monkeypatch: pytest.MonkeyPatch, asked: list[str], wrong: int | None, kept: int | None, wanted: list[str], told: int
) -> None:
    """Majors stand for inventories: the one that the hook found wrong, and the one that is kept by now."""
    monkeypatch.setattr(cache, "load", lambda _config: (Settings(), inventory(kept)) if kept else None)
    found = oci_inventory._discovered(CONFIG, (Settings(), inventory(wrong)) if wrong else None)
    assert (found[1].majors["nvidia"], asked) == (told, wanted)
