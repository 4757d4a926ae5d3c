"""Fixtures that several rooms of the tests share: simulated nodes, and what real containers need of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support.namespaces import CgroupV2
from tests.support.nodes import SimNode, dgx_a100, kept, mixed_node
from tests.support.runc import CARRIERS, RuncContainer, Start, runc_container


@pytest.fixture(scope="session")
def root_user() -> None:
    """Device nodes, mounts and cgroups: nothing of a real container works for an ordinary user."""
    if os.geteuid() != 0:
        pytest.skip("simulated nodes with device nodes, and containers on them, need root")


@pytest.fixture(scope="session")
def runc(root_user: None) -> None:
    missing = [name for name in ("runc", "busybox") if not shutil.which(name)]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: run tools/setup.sh")


@pytest.fixture(scope="session")
def nodes_folder(root_user: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="session")
def dgx(nodes_folder: Path) -> Iterator[SimNode]:
    """A DGX A100: GPU 0 is divided into seven MIG devices, GPU 1 into three. Shared: tests must not change it."""
    with kept(dgx_a100(nodes_folder / "dgx")) as node:
        yield node


@pytest.fixture(scope="session")
def mixed(nodes_folder: Path) -> Iterator[SimNode]:
    """Four kinds of GPU under an older driver. Shared: tests must not change it."""
    with kept(mixed_node(nodes_folder / "mixed")) as node:
        yield node


@pytest.fixture
def own_dgx(root_user: None, tmp_path: Path) -> Iterator[SimNode]:
    """A DGX A100 for one test alone, which may change it."""
    with kept(dgx_a100(tmp_path / "node")) as node:
        yield node


PROGRAMS = Path(__file__).with_name("programs")


@pytest.fixture(scope="session")
def static_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of programs that run in every container, with a C library or without."""
    folder = tmp_path_factory.mktemp("static")
    subprocess.run(["cc", "-O1", "-static", "-o", folder / "open_devices", PROGRAMS / "open_devices.c"], check=True)
    return folder


@pytest.fixture(scope="session")
def dlopen_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that opens libraries by name, for containers with a C library."""
    program = tmp_path_factory.mktemp("dynamic") / "dlopen_all"
    subprocess.run(["cc", "-O1", "-o", program, PROGRAMS / "dlopen_all.c"], check=True)
    return program


@pytest.fixture(scope="session")
def cgroup_v2(root_user: None) -> Iterator[CgroupV2]:
    if "cgroup2" not in Path("/proc/filesystems").read_text():
        pytest.skip("this kernel has no cgroup v2")
    with CgroupV2() as namespace:
        yield namespace


@pytest.fixture(params=["v1", "v2"])
def cgroups(request: pytest.FixtureRequest) -> list[str]:
    """The command before `runc` that has it use this version of device cgroups."""
    if request.param == "v2":
        return list(request.getfixturevalue("cgroup_v2").prefix)
    if not Path("/sys/fs/cgroup/devices").is_dir():
        pytest.skip("cgroup v1 devices is not mounted on this machine")
    return []


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest) -> str:
    """How the container of a test gets what it asks for, for `start` and `expect.carried`."""
    return str(request.param)


@pytest.fixture
def start(runc: None, static_programs: Path, tmp_path: Path) -> Start:
    """`with start(node, {"NVIDIA_VISIBLE_DEVICES": "0"}, ...) as container:`, as `runc_container` for one test."""

    def start_one(node: SimNode, env: Mapping[str, str], **options: Any) -> AbstractContextManager[RuncContainer]:
        return runc_container(tmp_path, node.path, env, programs=static_programs, **options)

    return start_one
