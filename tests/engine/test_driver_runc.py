"""A complete driver in real runc containers: graphics, display, extra nodes, MIG control, the image's newer CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvct.node.cache import cache_path
from nvct.sim import bundle as bundles
from nvct.sim.node import create, spec_from_yaml
from tests.support.runc import BY_HOOK, RuncContainer, StartFailed, hooks_of, kernel_hook, nvct_runtime
from tests.support.userns import MAPPED, make_bundle, public_folder, running

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="device nodes and runc need root"),
    pytest.mark.skipif(shutil.which("runc") is None, reason="runc is not installed"),
]

VERSION = "550.163.01"
LIB = f"/usr/lib/{os.uname().machine}-linux-gnu"
PROFILE = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
COMPAT = "/usr/local/cuda-12.9/compat"
NOTE = '{"Format": 1, "CUDA Version": "12.9", "Driver": [535, 550]}'
PROGRAMS = Path(__file__).parents[1] / "programs"

# GPU 0 is divided; GPU 1 has another minor, and another card number, than its index.
NODE = {
    "driver": VERSION,
    "gpus": [
        {"card": "a30", "minor": 1, "bus_id": "0000:47:00.0", "mig": ["1g.6gb", "1g.6gb"]},
        {"card": "t4", "minor": 0, "bus_id": "0000:07:00.0"},
    ],
    "gds": 1,
    "rdma": 2,
    "gdrcopy": True,
    "nvswitches": 2,
    "imex_channels": 2,
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("node")
    (folder / "node.yaml").write_text(yaml.safe_dump(NODE))
    made = create(spec_from_yaml(folder / "node.yaml"), folder / "made")
    if made.why_table:
        pytest.skip(f"no device nodes here: {made.why_table}")
    yield Path(made.directory)
    Path(cache_path(made.config)).unlink(missing_ok=True)  # the hook keeps its inventory in /run/nvct


@contextmanager
def container(
    folder: Path,
    node: Path,
    carrier: str,
    env: Mapping[str, str],
    image: Callable[[Path], object] = lambda rootfs: None,
    spec_change: Callable[[dict[str, Any]], object] = lambda spec: None,
) -> Iterator[RuncContainer]:
    bundle = folder / f"bundle-{time.monotonic_ns()}"
    bundle.mkdir()
    bundles.make_rootfs(bundle / "rootfs", "debian")
    image(bundle / "rootfs")
    hooks = hooks_of(node) if carrier == BY_HOOK else {"prestart": [kernel_hook(node)]}
    spec: dict[str, Any] = bundles.config(["/usr/bin/sleep", "600"], env, hooks)
    spec_change(spec)
    bundles.write_config(bundle, spec)
    started = RuncContainer(bundle, runtime=["runc"] if carrier == BY_HOOK else nvct_runtime(node))
    try:
        yield started
    finally:
        started.delete()


def asking(devices: str, capabilities: str = "compute,utility", **more: str) -> dict[str, str]:
    return {"NVIDIA_VISIBLE_DEVICES": devices, "NVIDIA_DRIVER_CAPABILITIES": capabilities, **more}


def drm_numbers(node: Path, bus: str) -> dict[str, int]:
    """Name to minor of one GPU's DRM nodes, by the node's own udev names."""
    links = {kind: os.readlink(node / f"dev/dri/by-path/pci-{bus}-{kind}") for kind in ("card", "render")}
    return {text[3:]: os.minor((node / "dev/dri" / text[3:]).stat().st_rdev) for text in links.values()}


def test_graphics(node: Path, carrier: str, tmp_path: Path) -> None:
    mine, other = drm_numbers(node, "0000:07:00.0"), drm_numbers(node, "0000:47:00.0")
    with container(tmp_path, node, carrier, asking("1", "graphics")) as started:
        root = started.root
        assert sorted(path.name for path in (root / "dev/dri").iterdir()) == sorted([*mine, "by-path"])
        for name, minor in mine.items():
            kind = "card" if name.startswith("card") else "render"
            link = f"dev/dri/by-path/pci-0000:07:00.0-{kind}"
            assert os.readlink(root / link) == f"../{name}"
            assert os.minor((root / "dev/dri" / name).lstat().st_rdev) == minor
            assert started.opens(226, minor)
        assert not any(started.opens(226, minor) for minor in other.values())
        assert (root / PROFILE[1:]).read_text() == (
            '{"profiles":[{"name":"_container_","settings":["EGLVisibleDGPUDevices",0x1]}],'
            '"rules":[{"pattern":[],"profile":"_container_"}]}\n'
        )
        for path, library in {
            "etc/vulkan/icd.d/nvidia_icd.json": "libGLX_nvidia.so.0",
            "etc/vulkan/implicit_layer.d/nvidia_layers.json": "libGLX_nvidia.so.0",
            "usr/share/glvnd/egl_vendor.d/10_nvidia.json": "libEGL_nvidia.so.0",
            "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json": "libnvidia-egl-gbm.so.1",
        }.items():
            assert library in (root / path).read_text()
            assert (root / LIB[1:] / library).exists()
        assert (root / "usr/share/nvidia/nvoptix.bin").stat().st_size
        gbm, allocator = root / LIB[1:] / "gbm/nvidia-drm_gbm.so", root / LIB[1:] / f"libnvidia-allocator.so.{VERSION}"
        assert os.path.samefile(gbm, allocator)
        for path in ("usr/share/X11", f"{LIB[1:]}/nvidia/xorg", "etc/OpenCL", "dev/nvidia-modeset", "dev/nvidia-uvm"):
            assert not (root / path).exists()


def test_display(node: Path, carrier: str, tmp_path: Path) -> None:
    with container(tmp_path, node, carrier, asking("1", "display")) as started:
        folder = started.root / LIB[1:] / "nvidia/xorg"
        assert sorted(path.name for path in folder.iterdir()) == [
            "libglxserver_nvidia.so",
            f"libglxserver_nvidia.so.{VERSION}",
            "nvidia_drv.so",
        ]
        assert os.readlink(folder / "libglxserver_nvidia.so") == f"libglxserver_nvidia.so.{VERSION}"
        config = (started.root / "usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf").read_text()
        assert f'ModulePath "{LIB}/nvidia/xorg"' in config
        assert (started.root / "dev/nvidia-modeset").is_char_device()
        assert (started.root / "etc/vulkan/icd.d/nvidia_icd.json").is_file()
        assert started.run("/usr/bin/nvidia-xconfig").returncode == 0


def test_all(node: Path, carrier: str, tmp_path: Path) -> None:
    with container(tmp_path, node, carrier, asking("1", "all")) as started:
        assert (started.root / "etc/OpenCL/vendors/nvidia.icd").read_text() == "libnvidia-opencl.so.1\n"
        assert (started.root / "usr/lib/i386-linux-gnu/libnvidia-egl-gbm.so.1").exists() == (
            node / "usr/lib/i386-linux-gnu"
        ).exists()
        assert not (started.root / "dev/gdrdrv").exists()
        assert started.run("/usr/bin/nvidia-smi", "-L").stdout.count("GPU ") == 1


def test_mig_devices_have_no_graphics(node: Path, carrier: str, tmp_path: Path) -> None:
    with container(tmp_path, node, carrier, asking("0:0", "all")) as started:
        assert not (started.root / "dev/dri").exists()
        assert "0x2" in (started.root / PROFILE[1:]).read_text()


def test_a_second_start_of_a_stopped_container(node: Path, carrier: str, tmp_path: Path) -> None:
    """What the first start left in the container's root is no obstacle, and the profile is that of the second."""
    roots: list[Path] = []
    with container(tmp_path, node, carrier, asking("1", "all"), image=roots.append):
        pass

    def same(rootfs: Path) -> None:
        shutil.rmtree(rootfs)
        roots[0].rename(rootfs)

    with container(tmp_path, node, carrier, asking("all", "all"), image=same) as started:
        assert "0x3" in (started.root / PROFILE[1:]).read_text()
        assert (started.root / "etc/vulkan/icd.d/nvidia_icd.json").stat().st_size


def test_a_read_only_folder_of_nvidia_costs_the_profile_only(node: Path, carrier: str, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()

    def mount(spec: dict[str, Any]) -> None:
        spec["mounts"].append(
            {"destination": "/etc/nvidia", "type": "bind", "source": str(volume), "options": ["bind", "ro"]}
        )

    with container(tmp_path, node, carrier, asking("1", "graphics"), spec_change=mount) as started:
        assert list((started.root / "etc/nvidia").iterdir()) == []
        assert (started.root / "dev/dri/by-path").exists()
    assert list(volume.iterdir()) == []


def test_what_is_made_in_a_user_namespace_is_its_roots(node: Path) -> None:
    with (
        public_folder() as folder,
        running(make_bundle(folder, hooks_of(node), asking("1", "all"), MAPPED, maps=True)) as started,
    ):
        made = [
            PROFILE,
            os.path.dirname(PROFILE),
            "/dev/dri/by-path",
            f"{LIB}/gbm/nvidia-drm_gbm.so",
            "/etc/vulkan/icd.d",
        ]
        assert {(started.root / path[1:]).lstat().st_uid for path in made} == {MAPPED}
        assert "0x1" in started.run("/usr/bin/cat", PROFILE).stdout


KINDS = {
    "NVIDIA_GDS": ("dev/nvidia-fs0",),
    "NVIDIA_MOFED": ("dev/infiniband/uverbs0", "dev/infiniband/uverbs1", "dev/infiniband/rdma_cm"),
    "NVIDIA_GDRCOPY": ("dev/gdrdrv",),
    "NVIDIA_NVSWITCH": ("dev/nvidia-nvswitchctl", "dev/nvidia-nvswitch0", "dev/nvidia-nvswitch1"),
}


@pytest.mark.parametrize("variable", list(KINDS))
def test_extra_nodes_when_asked_for_and_no_others(node: Path, carrier: str, tmp_path: Path, variable: str) -> None:
    with container(tmp_path, node, carrier, asking("1", **{variable: "enabled"})) as started:
        for name, paths in KINDS.items():
            for path in paths:
                number = (node / path).stat().st_rdev
                assert (started.root / path).exists() == (name == variable)
                assert started.opens(os.major(number), os.minor(number)) == (name == variable)
        for path in ("etc/cufile.json", "run/udev/data/b259:0"):
            assert (started.root / path).exists() == (variable == "NVIDIA_GDS")


def test_imex_channels(node: Path, carrier: str, tmp_path: Path) -> None:
    with container(tmp_path, node, carrier, asking("1", NVIDIA_IMEX_CHANNELS="1")) as started:
        folder = started.root / "dev/nvidia-caps-imex-channels"
        assert [path.name for path in folder.iterdir()] == ["channel1"]
        major = os.major((folder / "channel1").stat().st_rdev)
        assert (started.opens(major, 1), started.opens(major, 0)) == (True, False)
    with (
        pytest.raises(StartFailed, match=r"no \S+/dev/nvidia-caps-imex-channels/channel5; run: .*mknod"),
        container(tmp_path, node, carrier, asking("1", NVIDIA_IMEX_CHANNELS="5")),
    ):
        pass


def test_leave_to_configure_mig(node: Path, carrier: str, tmp_path: Path) -> None:
    def privileged(spec: dict[str, Any]) -> None:
        spec["process"]["capabilities"]["bounding"].append("CAP_SYS_ADMIN")

    env = asking("0", NVIDIA_MIG_CONFIG_DEVICES="all")
    with container(tmp_path, node, carrier, env, spec_change=privileged) as started:
        shown = started.root / "proc/driver/nvidia/capabilities"
        assert (shown / "mig/config").read_text().startswith("DeviceFileMinor: 1\n")
        assert not (shown / "mig/monitor").exists()
        assert len(list(shown.glob("gpu1/mig/gi*/ci0/access"))) == 2
        caps = started.root / "dev/nvidia-caps"
        assert len(list(caps.iterdir())) == 5  # two of each MIG device, and `config`
        config = (caps / "nvidia-cap1").stat().st_rdev
        assert started.opens(os.major(config), os.minor(config))


def compat_image(version: str, note: str = NOTE, real: str = COMPAT) -> Callable[[Path], object]:
    """An image with a CUDA toolkit and compatibility libraries in it, its path an absolute link to alternatives."""

    def furnish(rootfs: Path) -> None:
        folder = rootfs / real[1:]
        folder.mkdir(parents=True)
        source = folder / "source.c"
        text = note.replace('"', '\\"')
        source.write_text(
            '__attribute__((section(".note.cuda.fwd_compatibility"), aligned(4), used)) static const struct '
            f"{{ unsigned owner, text, kind; char name[20]; char json[{(len(note) + 4) // 4 * 4}]; }} note = "
            f'{{ 19, {len(note) + 1}, 1, "NVIDIA Corporation", "{text}" }};\n'
            if note
            else "int unused;\n"
        )
        library = folder / f"libcuda.so.{version}"
        options = ["-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["cc", *options, source, "-o", library], check=True)
        source.unlink()
        (folder / "libcuda.so.1").symlink_to(library.name)
        (rootfs / "etc/alternatives").mkdir()
        (rootfs / "etc/alternatives/cuda").symlink_to(os.path.dirname(real))
        (rootfs / "usr/local").mkdir(exist_ok=True)
        (rootfs / "usr/local/cuda").symlink_to("/etc/alternatives/cuda")
        subprocess.run(["cc", PROGRAMS / "dlopen_all.c", "-o", rootfs / "usr/bin/dlopen_all"], check=True)

    return furnish


def loaded(started: RuncContainer, name: str) -> str:
    """The file that the container's loader takes for a library's name."""
    return started.run("/usr/bin/dlopen_all", name).stdout.strip().partition("\t")[2]


@pytest.mark.parametrize(
    ("version", "note", "folder"),
    [
        ("575.57.08", NOTE, "/usr/local/cuda/compat"),
        ("575.57.08", "", "/usr/local/cuda/compat"),
        ("575.57.08", '{"Driver": [535]}', LIB),
        ("535.104.05", "", LIB),
        ("575.57.x", NOTE, LIB),
    ],
)
@pytest.mark.parametrize("name", ["libcuda.so.1", "libcuda.so"])
def test_the_images_newer_cuda(
    node: Path, carrier: str, tmp_path: Path, version: str, note: str, folder: str, name: str
) -> None:
    with container(tmp_path, node, carrier, asking("1"), image=compat_image(version, note)) as started:
        assert os.path.dirname(loaded(started, name)) == folder
        assert os.path.dirname(loaded(started, "libnvidia-ml.so.1")) == LIB
        assert not [path for path in started.mounts() if "compat" in path]


def test_the_images_newer_cuda_is_not_read_through_the_hosts_path(node: Path, carrier: str, tmp_path: Path) -> None:
    """The image's link names a path that exists on the host, too, with other libraries in it."""
    real = f"{tmp_path}/cuda/compat"
    Path(real).mkdir(parents=True)
    Path(real, "libcuda.so.1.0.0").write_text("the host's")
    Path(real, "libcuda.so.535.0.0").write_text("the host's")
    with container(tmp_path, node, carrier, asking("1"), image=compat_image("575.57.08", NOTE, real)) as started:
        assert os.path.dirname(loaded(started, "libcuda.so.1")) == "/usr/local/cuda/compat"


def test_the_images_newer_cuda_can_be_switched_off(node: Path, carrier: str, tmp_path: Path) -> None:
    config = node / "config.yaml"
    text = config.read_text()
    config.write_text(f"{text}cuda_compat: disabled\nparts: {{firmware: false, persistenced: false}}\n")
    try:
        with container(tmp_path, node, carrier, asking("1"), image=compat_image("575.57.08")) as started:
            assert os.path.dirname(loaded(started, "libcuda.so.1")) == LIB
            assert not (started.root / "lib/firmware").exists()
            assert not (started.root / "run/nvidia-persistenced").exists()
    finally:
        config.write_text(text)
