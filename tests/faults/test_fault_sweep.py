"""Every system call of an injection fails once, in every way: what was done is undone, or all is done nevertheless."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import Tally
from tests.support.faults import Order, sweep
from tests.support.nodes import SimNode

pytestmark = pytest.mark.engine

MIG = {"NVIDIA_VISIBLE_DEVICES": "0:1", "NVIDIA_DRIVER_CAPABILITIES": "utility"}
GRAPHICS = {"NVIDIA_VISIBLE_DEVICES": "2", "NVIDIA_DRIVER_CAPABILITIES": "graphics"}

# What is asked for, the version of device cgroups, and the age of the kernel.
SWEEPS = {
    "v1": (MIG, "v1", "today"),
    "v2": (MIG, "v2", "today"),
    "graphics": (GRAPHICS, "v1", "today"),
    "kernel-5.1": (MIG, "v1", "5.1"),
}


@pytest.fixture(params=list(SWEEPS))
def order(request: pytest.FixtureRequest, strace: str, dgx: SimNode, tmp_path: Path, seed: int) -> Order:
    env, version, kernel = SWEEPS[request.param]
    if version == "v1" and not Path("/sys/fs/cgroup/devices").is_dir():
        pytest.skip("cgroup v1 devices is not mounted on this machine")
    if version == "v2" and "cgroup2" not in Path("/proc/filesystems").read_text():
        pytest.skip("this kernel has no cgroup v2")
    return Order(str(dgx.path), str(tmp_path / "sweep"), env, version, kernel, sample=0, seed=seed, limit_s=3500)


def test_a_sample_of_failing_calls(order: Order, tally: Tally) -> None:
    """Of each call, some numbers and errors."""
    report = sweep(order._replace(sample=3, limit_s=90))
    tally.add(report.outcomes)
    assert report.wrong == []
    assert report.outcomes["undone"] > 30
    assert report.outcomes["complete"] > 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_failing_call(order: Order, tally: Tally) -> None:
    report = sweep(order)
    tally.add(report.outcomes)
    assert report.wrong == []
    assert report.outcomes["undone"] > 1000
