"""The runtime with a real runc: its modes, when it needs no hook, and bundles that are used more than once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nvct.ldcache import flags_for
from nvct.ldmerge import merge
from nvct.node.cache import cache_path
from nvct.sim import bundle as bundles
from nvct.sim import mig
from nvct.sim.profiles import spec_from_profile
from tests.support.cdi import generate, hook_free_sources, hooked, make_red_hat_root
from tests.support.expect import FOLDERS, carried, rules_v1, seen, wanted
from tests.support.nodes import DGX_MIG, SimNode
from tests.support.runc import BY_HOOK, BY_RUNTIME, RuncContainer, Start, StartFailed, kernel_hook, nvct_runtime

pytestmark = pytest.mark.engine

DEVICES = "NVIDIA_VISIBLE_DEVICES"
HOOK_FREE = "runtime_hook: needed\nmask_proc: false\n"


@pytest.fixture
def settings(dgx: SimNode, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a settings file for the node, with more lines."""
    made = []

    def make(lines: str) -> Path:
        made.append(tmp_path / f"config-{len(made)}.yaml")
        made[-1].write_text(dgx.config.read_text() + lines)
        return made[-1]

    yield make
    for path in made:
        Path(cache_path(str(path))).unlink(missing_ok=True)


def spec_of(container: RuncContainer) -> dict[str, Any]:
    """Its config.json as the runtime has left it."""
    spec: dict[str, Any] = json.loads((container.bundle / "config.json").read_text())
    return spec


def test_in_hook_mode_the_prestart_hook_does_it_all(
    dgx: SimNode, start: Start, settings: Callable[[str], Path]
) -> None:
    chosen = settings("runtime_mode: hook\n")
    with start(dgx, {DEVICES: "2,0:1"}, carrier=BY_RUNTIME, settings=chosen) as container:
        assert seen(container, dgx) == carried(wanted(dgx, ["2", "0:1"]), BY_HOOK)
        spec = spec_of(container)
        assert "devices" not in spec["linux"]
        assert f"{DEVICES}=2,0:1" in spec["process"]["env"]
        (hook,) = spec["hooks"]["createRuntime"]
        assert hook["args"] == ["nvidia-container-runtime-hook", "-config", str(chosen), "createRuntime"]


def test_the_spec_has_the_request_answered(dgx: SimNode, start: Start) -> None:
    with start(dgx, {DEVICES: "2"}, carrier=BY_RUNTIME) as container:
        spec = spec_of(container)
    assert [entry for entry in spec["process"]["env"] if entry.startswith(DEVICES)] == [f"{DEVICES}=void"]
    expected = wanted(dgx, ["2"])
    assert {entry["path"]: (entry["major"], entry["minor"]) for entry in spec["linux"]["devices"]} == expected["nodes"]
    assert {entry["fileMode"] for entry in spec["linux"]["devices"]} == {0o666}
    (hook,) = spec["hooks"]["createRuntime"]
    assert hook["env"] == ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
    assert hook["args"][:2] == ["nvct-cdi-hook", "createRuntime"]


@pytest.mark.parametrize("name", ["nvidia-container-runtime-hook", "nvidia-container-toolkit"])
def test_another_hook_that_would_give_gpus_is_taken_out(dgx: SimNode, start: Start, tmp_path: Path, name: str) -> None:
    foreign = tmp_path / name
    foreign.write_text("#!/bin/sh\necho foreign >&2; exit 1\n")
    foreign.chmod(0o755)
    hooks = [kernel_hook(dgx.path), {"path": str(foreign), "args": [name, "prestart"]}]
    with start(dgx, {DEVICES: "2"}, carrier=BY_RUNTIME, hooks=hooks) as container:
        assert seen(container, dgx) == carried(wanted(dgx, ["2"]), BY_RUNTIME)
    with pytest.raises(StartFailed, match="foreign"), start(dgx, {}, carrier=BY_RUNTIME, hooks=hooks):
        pass


@contextmanager
def started(bundle: Path, node: SimNode) -> Iterator[RuncContainer]:
    container = RuncContainer(bundle, runtime=nvct_runtime(node.path))
    try:
        yield container
    finally:
        container.delete()


def make_bundle(folder: Path, node: SimNode, value: str, static_programs: Path) -> Path:
    bundle = folder / "bundle"
    bundles.make_rootfs(bundle / "rootfs")
    for program in static_programs.iterdir():
        shutil.copy(program, bundle / "rootfs/usr/bin")
    spec = bundles.config(["/usr/bin/sleep", "600"], {DEVICES: value}, {"prestart": [kernel_hook(node.path)]})
    bundles.write_config(bundle, spec)
    return bundle


def test_a_bundle_that_is_used_again_gives_the_same(
    runc: None, dgx: SimNode, tmp_path: Path, static_programs: Path
) -> None:
    bundle = make_bundle(tmp_path, dgx, "0:1,4", static_programs)
    expected = carried(wanted(dgx, ["0:1", "4"]), BY_RUNTIME)
    with started(bundle, dgx) as container:
        assert seen(container, dgx) == expected
        once = (bundle / "config.json").read_text()
    with started(bundle, dgx) as container:
        assert container.look(dgx.device_numbers()).opens == expected["opens"]
        assert container.devices_v1() == rules_v1(expected["nodes"])
        assert json.loads((bundle / "config.json").read_text()) == json.loads(once)


def ask(bundle: Path, value: str | None) -> None:
    """Edit the request of a bundle, and nothing else of its config.json; None takes the variable away."""
    spec = json.loads((bundle / "config.json").read_text())
    env = [entry for entry in spec["process"]["env"] if not entry.startswith(f"{DEVICES}=")]
    spec["process"]["env"] = env if value is None else [*env, f"{DEVICES}={value}"]
    (bundle / "config.json").write_text(json.dumps(spec))


def test_a_request_that_is_edited_in_a_used_bundle_is_answered_anew(
    runc: None, dgx: SimNode, tmp_path: Path, static_programs: Path
) -> None:
    """Nothing of the earlier one stays, not even when nothing is asked for any more."""
    bundle = make_bundle(tmp_path, dgx, "0:1", static_programs)
    with started(bundle, dgx):
        pass
    for value, devices in (("5", ["5"]), ("4", ["4"]), ("none", [])):
        ask(bundle, value)
        with started(bundle, dgx) as container:
            assert container.look(dgx.device_numbers()).opens == carried(wanted(dgx, devices), BY_RUNTIME)["opens"]
    ask(bundle, None)
    with started(bundle, dgx) as container:
        assert container.look(dgx.device_numbers()).opens == set()
        assert container.devices_v1() == rules_v1({})


def test_a_bundle_that_is_used_again_gives_what_the_node_has_now(
    runc: None, own_dgx: SimNode, tmp_path: Path, static_programs: Path
) -> None:
    """0:1 is another MIG device after its GPU was divided otherwise, and what it was before is somebody else's."""
    bundle = make_bundle(tmp_path, own_dgx, "0:1", static_programs)
    with started(bundle, own_dgx) as container:
        before = container.look(own_dgx.device_numbers())
    spec = spec_from_profile("dgx-a100", mig={**DGX_MIG, 0: ("3g.20gb", "2g.10gb", "1g.5gb")})
    own_dgx.make(spec)
    device = mig.layout(spec.gpus[0])[1].compute[0]
    with started(bundle, own_dgx) as container:
        after = container.look(own_dgx.device_numbers())
    assert device.uuid in after.uuids
    assert device.uuid not in before.uuids
    caps = own_dgx.majors["nvidia-caps"]
    assert {number for number in before.opens & after.opens if number[0] == caps} == set()
    assert len({number for number in after.opens if number[0] == caps}) == 2


SONAMES = {
    "libnvidia-ml.so.1",
    "libcuda.so.1",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-nvvm.so.4",
    "libnvidia-opencl.so.1",
}


def red_hat(rootfs: Path) -> None:
    make_red_hat_root(rootfs)


def debian(rootfs: Path) -> None:
    bundles.make_rootfs(rootfs)


def debian_without_cache(rootfs: Path) -> None:
    bundles.make_rootfs(rootfs, loader_cache=False)


def stub_elsewhere(rootfs: Path) -> None:
    """The cache names a library of the image that nothing else would lead to."""
    bundles.make_rootfs(rootfs)
    (rootfs / "opt").mkdir()
    (rootfs / "opt/libcuda.so.1").write_text("a stub")
    cache = rootfs / "etc/ld.so.cache"
    cache.write_bytes(merge(cache.read_bytes(), [("libcuda.so.1", "/opt/libcuda.so.1", flags_for("x86_64", 64))]))


def same_place(rootfs: Path) -> None:
    """The cache names the very place, by the other path of a folder that is a link in most images."""
    bundles.make_rootfs(rootfs)
    cache = rootfs / "etc/ld.so.cache"
    path = f"{FOLDERS['debian'][0].removeprefix('/usr')}/libcuda.so.1"
    cache.write_bytes(merge(cache.read_bytes(), [("libcuda.so.1", path, flags_for("x86_64", 64))]))


def folder_by_cache(rootfs: Path) -> None:
    """This machine's loader does not search /usr/lib64, where libraries go in such an image."""
    bundles.make_rootfs(rootfs, "lib64")


def newer_cuda(rootfs: Path) -> None:
    bundles.make_rootfs(rootfs)
    folder = rootfs / "usr/local/cuda/compat"
    folder.mkdir(parents=True)
    command = ["cc", "-shared", "-fPIC", "-nostdlib", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*command, folder / "libcuda.so.575.57.08"], check=True)
    (folder / "libcuda.so.1").symlink_to("libcuda.so.575.57.08")


@pytest.mark.parametrize(
    ("image", "needed"),
    [
        (debian, False),
        (debian_without_cache, False),
        (red_hat, False),
        (same_place, False),
        (stub_elsewhere, True),
        (folder_by_cache, True),
        (newer_cuda, True),
    ],
)
def test_no_hook_where_the_image_needs_none(
    dgx: SimNode,
    start: Start,
    settings: Callable[[str], Path],
    tmp_path: Path,
    static_programs: Path,
    dlopen_all: Path,
    image: Callable[[Path], None],
    needed: bool,
) -> None:
    rootfs = tmp_path / "rootfs"
    image(rootfs)
    for program in (*static_programs.iterdir(), dlopen_all):
        shutil.copy(program, rootfs / "usr/bin")
    family = "debian" if (rootfs / "etc/debian_version").exists() else "lib64"
    options = {"carrier": BY_RUNTIME, "settings": settings(HOOK_FREE), "rootfs": rootfs, "family": family}
    with start(dgx, {DEVICES: "0:1,4"}, **options) as container:
        assert bool(spec_of(container).get("hooks", {}).get("createRuntime")) == needed
        expected = wanted(dgx, ["0:1", "4"])
        found = seen(container, dgx, None if needed else hook_free_sources(dgx))
        assert found["strangers"] == set()
        for part in ("nodes", "opens", "sees", "gone"):
            assert found[part] == expected[part], part
        if not needed:
            other = FOLDERS["lib64" if family == "debian" else "debian"][0]
            assert [path for path in found["mounts"] if path.startswith(f"{other}/")] == []
            assert found["written"] == set()
            assert found["links"] == {}
            assert found["names"] == {}
        loaded = dict(line.split("\t", 1) for line in container.sh(f"dlopen_all {' '.join(SONAMES)}").splitlines())
    assert loaded.keys() == SONAMES
    assert [name for name, path in loaded.items() if path.startswith("!")] == []
    cuda = os.path.dirname(loaded["libcuda.so.1"])
    assert cuda == ("/usr/local/cuda/compat" if image is newer_cuda else os.path.dirname(loaded["libnvidia-ml.so.1"]))


@pytest.mark.parametrize(
    "lines", ["runtime_hook: needed\n", "mask_proc: false\n"], ids=["the view of /proc", "asked for always"]
)
def test_a_hook_where_the_settings_need_one(
    dgx: SimNode, start: Start, settings: Callable[[str], Path], lines: str
) -> None:
    with start(dgx, {DEVICES: "4"}, carrier=BY_RUNTIME, settings=settings(lines)) as container:
        assert len(spec_of(container)["hooks"]["createRuntime"]) == 1
        assert container.new_loader_names() == wanted(dgx, ["4"])["names"]


def test_a_file_for_pictures_needs_a_hook(dgx: SimNode, start: Start, settings: Callable[[str], Path]) -> None:
    env = {DEVICES: "4", "NVIDIA_DRIVER_CAPABILITIES": "graphics"}
    with start(dgx, env, carrier=BY_RUNTIME, settings=settings(HOOK_FREE)) as container:
        assert len(spec_of(container)["hooks"]["createRuntime"]) == 1


def test_a_low_level_runtime_that_the_front_does_not_know_is_refused(
    dgx: SimNode, start: Start, settings: Callable[[str], Path]
) -> None:
    chosen = settings("runtimes: [/bin/true]\n")
    with (
        pytest.raises(StartFailed, match=r"nvct: the settings \(runtimes\) name /bin/true, .*: run `nvct refresh`"),
        start(dgx, {DEVICES: "2"}, carrier=BY_RUNTIME, settings=chosen),
    ):
        pass
    with start(dgx, {}, carrier=BY_RUNTIME, settings=chosen):
        pass  # nobody asks the settings


def test_a_device_of_the_spec_in_the_place_of_one_of_ours_is_refused(dgx: SimNode, start: Start) -> None:
    def change(spec: dict[str, Any]) -> None:
        spec["linux"]["devices"] = [{"path": "/dev/nvidiactl", "type": "c", "major": 1, "minor": 3}]

    with (
        pytest.raises(StartFailed, match="nvct: /dev/nvidiactl is the device 1:3 in config.json"),
        start(dgx, {DEVICES: "2"}, carrier=BY_RUNTIME, change=change),
    ):
        pass


def test_a_read_only_volume_costs_optional_files_only(dgx: SimNode, start: Start, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    mount = {"destination": "/etc/OpenCL", "type": "bind", "source": str(volume), "options": ["bind", "ro"]}
    with start(dgx, {DEVICES: "2"}, carrier=BY_RUNTIME, change=lambda spec: spec["mounts"].append(mount)) as container:
        assert "/etc/OpenCL/vendors/nvidia.icd" not in container.mounts()
        assert "/usr/bin/nvidia-smi" in container.mounts()
    assert os.listdir(volume) == []


@pytest.fixture(scope="module")
def specs(dgx: SimNode, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of CDI specs: the node's own, and one of another maker."""
    folder = tmp_path_factory.mktemp("cdi")
    generate(dgx, folder / "nvidia.yaml")
    other = {
        "cdiVersion": "0.5.0",
        "kind": "example.com/nic",
        "devices": [
            {
                "name": "a",
                "containerEdits": {
                    "env": ["NIC=a"],
                    "deviceNodes": [{"path": "/dev/nic", "type": "c", "major": 10, "minor": 229}],
                    "mounts": [{"hostPath": "/etc/hostname", "containerPath": "/opt/nic", "options": ["ro", "bind"]}],
                },
            }
        ],
    }
    (folder / "nic.json").write_text(json.dumps(other))
    return folder


@pytest.mark.parametrize(
    ("value", "devices"),
    [("0:1,4", ["0:1", "4"]), ("nvidia.com/gpu=GPU-db7cc168-04ab-513c-adda-9ae5da770fea", ["2"]), ("none", [])],
)
def test_in_cdi_mode_the_specs_of_the_node_say_what_a_device_needs(
    dgx: SimNode, start: Start, settings: Callable[[str], Path], specs: Path, value: str, devices: list[str]
) -> None:
    chosen = settings(f"runtime_mode: cdi\ncdi_spec_dirs: [{specs}]\n")
    with start(dgx, {DEVICES: value}, carrier=BY_RUNTIME, settings=chosen) as container:
        assert seen(container, dgx) == hooked(dgx, devices)


def has_nic(container: RuncContainer) -> bool:
    nic = container.root / "dev/nic"
    return nic.exists() and os.minor(nic.stat().st_rdev) == 229 and (container.root / "opt/nic").exists()


@pytest.mark.parametrize(
    ("env", "annotations", "devices", "nic"),
    [
        ({DEVICES: "example.com/nic=a"}, {}, [], True),
        ({DEVICES: "example.com/nic=a,0:1"}, {}, ["0:1"], True),
        ({DEVICES: "2"}, {"cdi.k8s.io/x": "nvidia.com/gpu=4"}, ["4"], False),
        ({}, {"cdi.k8s.io/x": "nvidia.com/gpu=0:1", "cdi.k8s.io/y": "example.com/nic=a"}, ["0:1"], True),
        ({}, {"cdi.k8s.io/y": "example.com/nic=a"}, [], True),
    ],
)
def test_devices_of_other_makers_and_annotations(
    dgx: SimNode,
    start: Start,
    settings: Callable[[str], Path],
    specs: Path,
    env: dict[str, str],
    annotations: dict[str, str],
    devices: list[str],
    nic: bool,
) -> None:
    chosen = settings(f"cdi_spec_dirs: [{specs}]\n")
    options = {"carrier": BY_RUNTIME, "settings": chosen}
    with start(dgx, env, change=lambda spec: spec.update(annotations=annotations), **options) as container:
        assert has_nic(container) == nic
        looked = container.look(dgx.device_numbers())
    expected = wanted(dgx, devices)
    assert looked.opens == (expected["opens"] if devices else set())
    assert looked.uuids == (expected["sees"] if devices else set())


def test_another_makers_device_needs_no_driver(start: Start, dgx: SimNode, specs: Path, tmp_path: Path) -> None:
    chosen = tmp_path / "config.yaml"
    chosen.write_text(f"root: {tmp_path}\nproc_root: {tmp_path}\ncdi_spec_dirs: [{specs}]\n")
    with start(dgx, {DEVICES: "example.com/nic=a"}, carrier=BY_RUNTIME, settings=chosen, hooks=[]) as container:
        assert has_nic(container)
    with (
        pytest.raises(StartFailed, match="nvct: "),
        start(dgx, {DEVICES: "example.com/nic=a,0"}, carrier=BY_RUNTIME, settings=chosen, hooks=[]),
    ):
        pass


def test_a_name_that_no_spec_has_is_refused(
    dgx: SimNode, start: Start, settings: Callable[[str], Path], specs: Path
) -> None:
    chosen = settings(f"cdi_spec_dirs: [{specs}]\n")
    with (
        pytest.raises(
            StartFailed, match="nvct: `example.com/nic=b`: no spec has this device; valid are example.com/nic=a"
        ),
        start(dgx, {DEVICES: "example.com/nic=b"}, carrier=BY_RUNTIME, settings=chosen),
    ):
        pass


def test_conditions_on_the_driver_hold_in_every_mode(
    dgx: SimNode, start: Start, settings: Callable[[str], Path], specs: Path
) -> None:
    for mode in ("auto", "spec", "hook", "cdi"):
        chosen = settings(f"runtime_mode: {mode}\ncdi_spec_dirs: [{specs}]\n")
        env = {DEVICES: "2", "NVIDIA_REQUIRE_CUDA": "cuda>=99.0"}
        with (
            pytest.raises(StartFailed, match=r"env NVIDIA_REQUIRE_CUDA: .* does not meet `cuda>=99.0`"),
            start(dgx, env, carrier=BY_RUNTIME, settings=chosen),
        ):
            pass


def test_32_bit_libraries_without_a_hook(
    dgx: SimNode, start: Start, settings: Callable[[str], Path], tmp_path: Path, static_programs: Path
) -> None:
    """They are where the image's own 32-bit loader looks, if it has one; without, nobody knows where that would be."""
    env = {DEVICES: "4", "NVIDIA_DRIVER_CAPABILITIES": "compute,compat32"}
    for loader in (False, True):
        rootfs = tmp_path / f"rootfs-{loader}"
        make_red_hat_root(rootfs)
        for program in static_programs.iterdir():
            shutil.copy(program, rootfs / "usr/bin")
        if loader:
            (rootfs / "usr/lib/ld-linux.so.2").write_bytes(b"\0/lib/\0/usr/lib/\0")
        options = {"carrier": BY_RUNTIME, "settings": settings(HOOK_FREE), "rootfs": rootfs, "family": "lib64"}
        with start(dgx, env, **options) as container:
            assert bool(spec_of(container).get("hooks", {}).get("createRuntime")) != loader
            assert (container.root / "usr/lib/libcuda.so.1").exists()
