"""Every spec that nvct writes: its hooks run outside of the container, with an env that says all there is."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvct.cdi.devices import GPU, MODES
from nvct.sim.node import create, spec_from_yaml
from tests.security.test_environment import faults, hooks_in, hostile_env, set_traps
from tests.support.cdi import generate
from tests.support.nodes import SimNode
from tests.support.runc import TREE

HOOK = TREE / "hooks/nvct-cdi-hook"

# A node that has something for every mode.
EVERYTHING = """
driver: 550.163.01
gpus:
- {card: a30, minor: 1, bus_id: "0000:47:00.0", mig: [1g.6gb, 1g.6gb]}
- {card: t4, minor: 0, bus_id: "0000:07:00.0"}
gds: 1
rdma: 2
gdrcopy: true
nvswitches: 2
imex_channels: 2
"""


@pytest.fixture(scope="module")
def node(root_user: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimNode]:
    folder = tmp_path_factory.mktemp("emitters")
    (folder / "node.yaml").write_text(EVERYTHING)
    spec = spec_from_yaml(folder / "node.yaml")
    if create(spec, folder / "node").why_table:
        pytest.skip("no device nodes can be made here")
    node = SimNode(spec, folder / "node", {}, {}, set())
    yield node
    node.forget()


def emitted(node: SimNode, folder: Path) -> dict[str, Any]:
    """Every kind of spec, by what makes it: a command that writes another one belongs here."""
    specs = {}
    for mode in MODES:
        for options in ((), ("--no-hooks",), ("--format", "json")):
            file = folder / f"{len(specs)}.{'json' if 'json' in options else 'yaml'}"
            path = generate(node, file, "--mode", mode, *options)
            specs[" ".join(("cdi generate --mode", mode, *options))] = yaml.safe_load(path.read_text())
    return specs


def test_no_hook_has_a_fault(node: SimNode, tmp_path: Path) -> None:
    specs = emitted(node, tmp_path)
    assert {name: faults(spec) for name, spec in specs.items()} == dict.fromkeys(specs, [])


def test_there_is_one_hook_and_only_where_something_is_left_to_do(node: SimNode, tmp_path: Path) -> None:
    for name, spec in emitted(node, tmp_path).items():
        hooks = [(stage, hook["path"]) for stage, hook in hooks_in(spec)]
        has_one = any(f"--mode {mode}" in name for mode in (GPU, "management")) and "--no-hooks" not in name
        assert hooks == ([("createRuntime", str(HOOK))] if has_one else []), name


def test_the_hook_takes_nothing_from_its_surroundings(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    set_traps(evil)
    done = subprocess.run([HOOK, "--version"], capture_output=True, text=True, cwd=evil, env=hostile_env(evil))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("nvct-cdi-hook ")


STATE = {"pid": os.getpid(), "bundle": "/nowhere"}
EMPTY = '{"architecture":"x86_64","edits":{}}'


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "usage: nvct-cdi-hook createRuntime JSON"),
        (("prestart", EMPTY), 2, "usage: "),
        (("createRuntime",), 2, "usage: "),
        (("createRuntime", "{"), 1, "nvct: the hook's argument is not JSON"),
        (("createRuntime", "[" * 100_000), 1, "nvct: the hook's argument is not JSON"),
        (("createRuntime", "{}"), 1, "nvct: the hook's JSON is not what this version of nvct writes"),
        (("createRuntime", EMPTY), 1, "nvct: '/nowhere/config.json': No such file or directory"),
    ],
)
def test_what_the_hook_cannot_do_is_told_in_one_line(arguments: tuple[str, ...], status: int, said: str) -> None:
    done = subprocess.run([HOOK, *arguments], input=json.dumps(STATE), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(said)
    assert status == 2 or len(done.stderr.splitlines()) == 1


def test_the_hook_acts_in_no_namespace_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "rootfs").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"root": {"path": str(tmp_path / "rootfs")}}))
    state = {"pid": os.getpid(), "bundle": str(tmp_path)}
    argument = '{"architecture":"x86_64","edits":{"links":{"/l":"x"}}}'
    done = subprocess.run([HOOK, "createRuntime", argument], input=json.dumps(state), capture_output=True, text=True)
    assert done.returncode == 1
    assert "has no mount namespace of its own" in done.stderr
    assert list((tmp_path / "rootfs").iterdir()) == []
