"""Imports go one way, and the hook's modules import nothing that is slow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nvct

PACKAGE = Path(nvct.__file__).parent

# The rooms from the ground up; a module may import those of its own room and of rooms below, never of one beside it.
FLOORS = (
    ("__init__", "record", "errors", "fastjson", "trust"),
    ("userns", "strictyaml"),
    ("model",),
    ("settings", "ldcache", "edits", "specparts"),
    ("ldmerge",),
    ("requirements", "request", "established"),
    ("plan",),
    ("explain",),
    ("inject", "node"),
    ("oci", "cdi", "engines", "mig", "limits", "k8s", "metrics", "doctor", "sim"),
    ("cli",),
    ("__main__", "start"),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What runs in the hook, and therefore may not import what is slow.
HOT = (
    "nvct.record",
    "nvct.errors",
    "nvct.fastjson",
    "nvct.userns",
    "nvct.trust",
    "nvct.model",
    "nvct.settings",
    "nvct.ldcache",
    "nvct.ldmerge",
    "nvct.requirements",
    "nvct.request",
    "nvct.plan",
    "nvct.node.procfs",
    "nvct.node.saved",
    "nvct.node.cache",
    "nvct.node.recheck",
    "nvct.node.current",
    "nvct.oci.hook",
    "nvct.oci.give",
    "nvct.start",
    "nvct.oci.finish",
)
SLOW = set(
    """click yaml pynvml pyroute2 psutil elftools dataclasses typing pathlib subprocess logging argparse re json ctypes
    struct functools collections contextlib enum tempfile shutil""".split()  # noqa: SIM905  # twenty lines otherwise
)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts), path


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> set[str]:
    """Every module of nvct that the file names in an import, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively: name the module whole"
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "nvct" else {str(node.module)}
            )
    return {name for name in found if name.split(".")[0] == "nvct"}


def may_import(importer: str, imported: str) -> bool:
    mine, theirs = room_of(importer), room_of(imported)
    if theirs not in FLOOR:  # `from nvct import __version__`
        return theirs == "__version__"
    return mine == theirs or FLOOR[theirs] < FLOOR[mine]


@pytest.mark.parametrize(("module", "path"), list(modules()))
def test_imports_go_one_way(module: str, path: Path) -> None:
    assert room_of(module) in FLOOR, f"{module} is in no room: give it a floor here"
    assert [name for name in sorted(imports(path)) if not may_import(module, name)] == []


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("nvct.plan.devices", "nvct.model", True),
        ("nvct.cli.node", "nvct.node.cache", True),
        ("nvct.node.cache", "nvct.settings", True),
        ("nvct.node.cache", "nvct.inject.mounts", False),
        ("nvct.inject.mounts", "nvct.node.nvml", False),
        ("nvct.plan.devices", "nvct.node.cache", False),
        ("nvct.oci.hook", "nvct.cli.main", False),
        ("nvct.model", "nvct.settings", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert may_import(importer, imported) == allowed


def loaded_by(module: str) -> set[str]:
    """The modules that a hook's interpreter has after importing this one, besides those that it starts with."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules); "
        "__import__(sys.argv[2]); print(*(set(sys.modules) - before))"
    )
    command = [sys.executable, "-I", "-S", "-c", program, str(PACKAGE.parent), module]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", HOT)
def test_the_hooks_modules_import_nothing_slow(module: str) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert sorted(loaded & SLOW) == []


def test_a_slow_import_would_be_seen() -> None:
    assert "re" in loaded_by("json")
