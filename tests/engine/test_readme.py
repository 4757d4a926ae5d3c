"""The README's output blocks are what the commands print today."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvct.node.cache import cache_path
from nvct.node.procfs import read_majors

TREE = Path(__file__).resolve().parent.parent.parent
EXAMPLE = "/srv/node"  # where the README's node is; the test's is elsewhere

BLOCKS = re.findall(r"```console\n\$ (.*)\n((?:.*\n)*?)```", (TREE / "README.md").read_text())

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="the README shows a node with real device nodes, which root makes"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("readme") / "node"
    yield str(folder)
    Path(cache_path(f"{folder}/config.yaml")).unlink(missing_ok=True)


def test_the_readme_has_blocks() -> None:
    assert len(BLOCKS) >= 6


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_the_readme_shows_what_is_printed(command: str, shown: str, place: str) -> None:
    """A line `...` in a block stands for any lines. Blocks build on one another, in the README's order."""
    words = shlex.split(command.replace(EXAMPLE, place))
    if words[0] == "nvct":  # the one of this tree, whatever the environment has installed
        words[:1] = [sys.executable, "-I", str(TREE / "nvct/__main__.py")]
    elif words == ["make", "demo"]:
        words = [sys.executable, str(TREE / "tools/demo.py")]
    done = subprocess.run(words, capture_output=True, text=True)
    printed = with_the_readmes_majors((done.stdout + done.stderr).replace(place, EXAMPLE), place)
    pattern = re.escape(in_columns(shown)).replace(re.escape("...\n"), "(?:.*\n)*?")
    assert re.fullmatch(pattern, in_columns(printed)), printed


def in_columns(text: str) -> str:
    """Two blanks between columns, however wide: the width of one follows the length of the node's path."""
    return re.sub(r"(?<=\S)  +", "  ", text)


# A simulated node takes the highest majors that are free on its machine: those of the README's.
MAJORS = {"nvidia-uvm": 511, "nvidia-caps": 510, "nvidia-nvswitch": 509}


def with_the_readmes_majors(text: str, place: str) -> str:
    devices = Path(place, "proc/devices")
    actual = read_majors(f"{place}/proc") if devices.exists() else {}
    for name, major in MAJORS.items():
        if name in actual:
            text = text.replace(f" {actual[name]}:", f" {major}:").replace(f"{name} {actual[name]}", f"{name} {major}")
    return text
