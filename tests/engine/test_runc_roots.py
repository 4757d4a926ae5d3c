"""Each driver capability, and each kind of root file system, in real runc containers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.expect import FOLDERS, carried, rules_v1, seen, wanted
from tests.support.namespaces import MountNamespace
from tests.support.nodes import SimNode
from tests.support.runc import Start, StartFailed, make_root
from tests.support.trees import read_tree

pytestmark = pytest.mark.engine

EVERY = ("compute", "utility", "video", "compat32", "ngx", "graphics", "display")


def env_of(devices: str, capabilities: str) -> dict[str, str]:
    return {"NVIDIA_VISIBLE_DEVICES": devices, "NVIDIA_DRIVER_CAPABILITIES": capabilities}


@pytest.mark.parametrize(
    ("value", "capabilities"),
    [
        *((name, (name,)) for name in EVERY),
        ("", ("compute", "utility")),
        ("utility,video", ("utility", "video")),
        (" graphics , utility,graphics,", ("graphics", "utility")),
        ("compute,compat32", ("compute", "compat32")),
        ("all", EVERY),
        ("compute,all", EVERY),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_capabilities(dgx: SimNode, start: Start, carrier: str, value: str, capabilities: tuple[str, ...]) -> None:
    with start(dgx, env_of("0:3,6", value), carrier=carrier) as container:
        expected = carried(wanted(dgx, ["0:3", "6"], capabilities), carrier)
        assert seen(container, dgx) == expected
        assert container.devices_v1() == rules_v1(expected["nodes"])


def test_a_library_that_the_node_lacks_is_left_out_with_a_word(mixed: SimNode, start: Start) -> None:
    """The mixed node's loader cache lists libnvidia-encode, whose files are gone."""
    with start(mixed, env_of("3", "utility,video")) as container:
        expected = wanted(mixed, ["3"], ("utility", "video"), without=["libnvidia-encode."])
        assert seen(container, mixed) == expected


ROOTS = [("debian", True), ("debian", False), ("lib64", True), ("lib64", False), ("busybox", False)]


@pytest.mark.parametrize("read_only", [False, True], ids=["writable", "readonly"])
@pytest.mark.parametrize(("family", "loader_cache"), ROOTS)
def test_roots(
    dgx: SimNode, start: Start, carrier: str, cgroups: list[str], family: str, loader_cache: bool, read_only: bool
) -> None:
    """`readonly: true` of the runtime spec takes effect after the hooks."""
    options = {"family": family, "loader_cache": loader_cache, "read_only": read_only, "carrier": carrier}
    with start(dgx, env_of("1:1,4", "all"), prefix=cgroups, **options) as container:
        assert ("ro" in container.mounts()["/"]) == read_only
        assert seen(container, dgx) == carried(wanted(dgx, ["1:1", "4"], EVERY, family), carrier)


def test_the_container_sees_no_other_gpu_in_proc(dgx: SimNode, start: Start) -> None:
    """The texts of /proc/driver/nvidia: `params` tells the driver's libraries to make no nodes."""
    with start(dgx, env_of("1:1", "compute")) as container:
        shown, own = container.root / "proc/driver/nvidia", dgx.path / "proc/driver/nvidia"
        for name in ("version", "registry"):
            assert (shown / name).read_text() == (own / name).read_text()
        params = (own / "params").read_text()
        assert "ModifyDeviceFiles: 1\n" in params
        assert (shown / "params").read_text() == params.replace("ModifyDeviceFiles: 1\n", "ModifyDeviceFiles: 0\n")
        assert "GPU-45f9797d" in (shown / "gpus/0000:4e:00.0/information").read_text()
        assert (shown / "capabilities/gpu2/mig/gi3/access").read_text().startswith("DeviceFileMinor: 300\n")
        said = container.sh("echo 1 > /proc/driver/nvidia/params; echo 1 > /dev/nvidiactl; mkdir /proc/driver/nvidia/x")
        assert said.count("Read-only file system") == 2
        assert "nvidiactl: No such device or address" in said


def test_32_bit_libraries_where_red_hat_has_them(
    dgx: SimNode, start: Start, static_programs: Path, tmp_path: Path
) -> None:
    """A root with /usr/lib32 gets them there, as does one whose /usr/lib is /usr/lib64."""
    for name in ("lib32", "merged"):
        rootfs = tmp_path / name
        make_root(rootfs, "lib64", True, static_programs)
        if name == "lib32":
            (rootfs / "usr/lib32").mkdir()
        else:
            shutil.rmtree(rootfs / "usr/lib64")
            (rootfs / "usr/lib64").symlink_to("lib")
        with start(dgx, env_of("5", "compute,compat32"), family="lib64", rootfs=rootfs) as container:
            mounts = container.mounts()
            assert f"/usr/lib32/libcuda.so.{dgx.version}" in mounts
            folder = "/usr/lib64" if name == "lib32" else "/usr/lib"
            assert f"{folder}/libcuda.so.{dgx.version}" in mounts
            assert container.loader_names()["libcuda.so.1", 32] == "/usr/lib32/libcuda.so.1"
            assert container.loader_names()["libcuda.so.1", 64] == "/usr/lib64/libcuda.so.1"


@pytest.mark.parametrize("family", ["debian", "lib64", "busybox"])
def test_a_read_only_file_system(
    dgx: SimNode, start: Start, carrier: str, static_programs: Path, tmp_path: Path, family: str
) -> None:
    """What has no place in it is refused by name; once prepared, by a start while it was writable, it works."""
    rootfs = tmp_path / "rootfs"
    make_root(rootfs, family, family == "debian", static_programs)
    env, options = env_of("0:3,6", "utility"), {"family": family, "rootfs": rootfs, "carrier": carrier}
    before = read_tree(rootfs)
    bind = f"mount --bind {rootfs} {rootfs}; mount -o remount,bind,ro {rootfs}"
    with MountNamespace(bind) as read_only:
        with pytest.raises(StartFailed) as failure, start(dgx, env, prefix=read_only.prefix, **options):
            pass
        said = str(failure.value)
        assert "the container's root file system is read-only and has no files to mount on at " in said
        assert f"{FOLDERS[family][0]}/libnvidia-ml.so.{dgx.version}, " in said
        assert "/usr/bin/nvidia-smi" in said
    assert read_tree(rootfs) == before
    with start(dgx, env, **options) as container:
        first = seen(container, dgx)
        assert first == carried(wanted(dgx, ["0:3", "6"], ("utility",), family), carrier)
    prepared = read_tree(rootfs)
    with MountNamespace(bind) as read_only, start(dgx, env, prefix=read_only.prefix, **options) as container:
        assert "ro" in container.mounts()["/"]
        again = seen(container, dgx)
        # Nothing is new in the image this time.
        assert again == {**first, "links": {}, "written": set(), "names": {}}
    assert read_tree(rootfs) == prepared


def test_a_root_on_a_file_system_of_its_own(dgx: SimNode, start: Start, static_programs: Path, tmp_path: Path) -> None:
    """As docker's overlay: an upper layer takes the changes, the image below stays as it was."""
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    make_root(lower, "debian", True, static_programs)
    for folder in (upper, work, merged):
        folder.mkdir()
    before = read_tree(lower)
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    with MountNamespace(f"mount -t overlay overlay -o {layers} {merged}") as overlay:
        with start(dgx, env_of("0:3,6", "compute,utility"), prefix=overlay.prefix, rootfs=merged) as container:
            look = container.look(dgx.device_numbers())
            expected = wanted(dgx, ["0:3", "6"])
            assert (look.opens, look.uuids) == (expected["opens"], expected["sees"])
            mounts = {path: options for path, options in container.mounts().items() if path in expected["mounts"]}
            assert mounts.keys() == expected["mounts"].keys()
        written = {path for path, what in read_tree(upper).items() if not what.is_folder}
    places = {path for path in expected["mounts"] if path.startswith(("/etc/", "/usr/", "/run/"))}
    assert written == places | expected["links"].keys() | {"/etc/ld.so.cache"}
    assert read_tree(lower) == before


def test_a_root_in_the_middle_of_a_path_with_links(
    dgx: SimNode, start: Start, static_programs: Path, tmp_path: Path
) -> None:
    """Absolute links of an image mean places in the image, whatever the host has there."""
    rootfs = tmp_path / "rootfs"
    make_root(rootfs, "debian", True, static_programs)
    outside = tmp_path / "outside"
    outside.mkdir()
    libraries = rootfs / FOLDERS["debian"][0][1:]
    inside = rootfs / str(outside)[1:]
    inside.mkdir(parents=True)
    for path in libraries.iterdir():
        os.rename(path, inside / path.name)
    libraries.rmdir()
    libraries.symlink_to(outside)
    with start(dgx, env_of("3", "utility"), rootfs=rootfs) as container:
        assert f"{outside}/libnvidia-ml.so.{dgx.version}" in container.mounts()
        assert container.look(dgx.device_numbers()).uuids == {dgx.gpus["3"].uuid}
    assert list(outside.iterdir()) == []
