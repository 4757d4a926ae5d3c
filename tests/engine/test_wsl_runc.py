"""Real runc containers on a node in the Windows Subsystem for Linux, through the prestart hook."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvct.ldcache import parse
from nvct.node.cache import cache_path
from nvct.sim.errors import SimError
from nvct.sim.node import create, refuse_real_driver, spec_from_profile
from nvct.sim.wsl import LIBRARIES, LIBRARY_FOLDER, NVIDIA_STORE, OTHER_STORE
from tests.support.runc import StartFailed, runc_container

try:
    refuse_real_driver()
except SimError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="real containers with device nodes need root"),
    pytest.mark.skipif(shutil.which("runc") is None, reason="runc is not installed: make setup"),
    pytest.mark.skipif(
        not Path("/sys/fs/cgroup/devices/devices.allow").exists(), reason="no cgroup v1 devices controller is mounted"
    ),
]

SPEC = spec_from_profile("wsl2")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = create(SPEC, tmp_path_factory.mktemp("wsl") / "node")
    if made.why_table:
        pytest.skip(f"no real device nodes here: {made.why_table}")
    yield Path(made.directory)
    Path(cache_path(made.config)).unlink(missing_ok=True)


def number_of(node: Path) -> tuple[int, int]:
    device = (node / "dev/dxg").lstat().st_rdev
    return os.major(device), os.minor(device)


@pytest.mark.parametrize("family", ["debian", "lib64"])
def test_a_container_has_the_one_device_and_the_driver_of_windows(tmp_path: Path, node: Path, family: str) -> None:
    with runc_container(tmp_path, node, {"NVIDIA_VISIBLE_DEVICES": "all"}, family) as container:
        listed = container.sh("nvidia-smi -L")
        assert [gpu.uuid in listed for gpu in SPEC.gpus] == [True, True], listed
        assert (container.root / "dev/dxg").lstat().st_rdev == os.makedev(*number_of(node))
        assert container.opens(*number_of(node))
        major, minor = number_of(node)
        assert f"c {major}:{minor} rw" in " ".join(container.devices_v1())
        assert not container.opens(195, 255)
        ours = {path for path in container.mounts() if "nvidia" in path or "wsl" in path or "dxg" in path}
        store = {*LIBRARIES, "libnvidia-ml.so.1", "nvcubins.bin", "nvoptix.bin", "nvdxgdmal64.dll"}
        assert ours == {
            *(f"/{NVIDIA_STORE}/{name}" for name in store),
            f"/{LIBRARY_FOLDER}/libdxcore.so",
            "/usr/bin/nvidia-smi",
            "/dev/dxg",
        }
        assert all({"ro", "nosuid"} <= container.mounts()[path] for path in ours)
        cache = parse((container.root / "etc/ld.so.cache").read_bytes())
        names = {entry.name: entry.path for entry in cache.entries}
        assert names["libcuda.so.1"] == f"/{NVIDIA_STORE}/libcuda_loader.so"
        assert names["libdxcore.so"] == f"/{LIBRARY_FOLDER}/libdxcore.so"
        assert not (container.root / OTHER_STORE).exists()


def test_one_of_two_gpus_is_given_with_a_warning(tmp_path: Path, node: Path) -> None:
    with runc_container(tmp_path, node, {"NVIDIA_VISIBLE_DEVICES": "1"}) as container:
        assert container.opens(*number_of(node))
        # runc shows a hook's words only when it fails; the same plan is what `nvct plan` prints.
        assert SPEC.gpus[0].uuid in container.sh("nvidia-smi -L")


def test_a_container_that_asks_for_no_gpu_has_no_device(tmp_path: Path, node: Path) -> None:
    with runc_container(tmp_path, node, {"NVIDIA_VISIBLE_DEVICES": "none"}) as container:
        assert not container.opens(*number_of(node))
        assert not (container.root / "dev/dxg").exists()
        assert (container.root / NVIDIA_STORE / "libcuda_loader.so").exists()
        assert "GPU-" not in container.sh("nvidia-smi -L")


def test_a_mig_device_is_refused_and_nothing_is_left(tmp_path: Path, node: Path) -> None:
    with (
        pytest.raises(StartFailed, match="MIG mode is off"),
        runc_container(tmp_path, node, {"NVIDIA_VISIBLE_DEVICES": "0:0"}),
    ):
        pass
    (bundle,) = tmp_path.glob("bundle-*")
    assert not (bundle / "rootfs" / "usr/lib/wsl").exists()


def test_a_new_driver_of_windows_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    made = create(SPEC, tmp_path / "node")
    other = Path(made.directory)
    try:
        with runc_container(tmp_path, other, {"NVIDIA_VISIBLE_DEVICES": "all"}) as container:
            rootfs = Path(os.path.realpath(container.bundle / "rootfs"))
        (other / NVIDIA_STORE).rename(other / "usr/lib/wsl/drivers/nv_dispi.inf_amd64_new")
        with runc_container(tmp_path, other, {"NVIDIA_VISIBLE_DEVICES": "all"}, rootfs=rootfs) as container:
            assert os.listdir(container.root / "usr/lib/wsl/drivers") == ["nv_dispi.inf_amd64_new"]
            cache = parse((container.root / "etc/ld.so.cache").read_bytes())
            assert not [entry.path for entry in cache.entries if NVIDIA_STORE in entry.path]
            assert SPEC.gpus[1].uuid in container.sh("nvidia-smi -L")
    finally:
        Path(cache_path(made.config)).unlink(missing_ok=True)
