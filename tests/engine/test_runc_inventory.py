"""The hook and its kept inventory: made once when it is missing, and never believed when the node has changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvct import settings
from nvct.node.cache import stamp
from nvct.record import replace
from nvct.sim.node import create, spec_from_profile
from nvct.sim.spec import NvmlBehaviour
from tests.support.expect import NOTHING, seen, wanted
from tests.support.namespaces import MountNamespace
from tests.support.nodes import DGX_MIG, GpuFacts, MigFacts, SimNode
from tests.support.runc import Start, StartFailed, kernel_hook, nvct_hook
from tests.support.watch import nvml_starts

pytestmark = pytest.mark.engine

GPU_2 = {"NVIDIA_VISIBLE_DEVICES": "2"}
STATE = "proc/driver/nvct-sim"


def refusal(start: Start, node: SimNode, env: dict[str, str], log: Path) -> str:
    """The one line that the hook says when it does not start the container."""
    log.unlink(missing_ok=True)
    hooks = [kernel_hook(node.path), nvct_hook(node.path, log)]
    with pytest.raises(StartFailed), start(node, env, hooks=hooks):
        pass
    (line,) = log.read_text().splitlines()
    return line


def test_the_first_start_discovers_and_the_next_does_not(own_dgx: SimNode, start: Start) -> None:
    assert not own_dgx.cache.exists()
    with nvml_starts(own_dgx) as opens:
        with start(own_dgx, {}):
            pass
        assert opens.count() == 0  # it asks for nothing
        assert not own_dgx.cache.exists()
        with start(own_dgx, GPU_2):
            assert own_dgx.cache.exists()
            assert opens.count() > 0
        with start(own_dgx, GPU_2) as container:
            assert opens.count() == 0
            assert seen(container, own_dgx) == wanted(own_dgx, ["2"])
    status = own_dgx.cache.stat()
    assert (status.st_uid, status.st_mode & 0o777) == (0, 0o644)


def test_another_mig_layout(own_dgx: SimNode, start: Start, tmp_path: Path) -> None:
    """`0:1` and a UUID of the old layout: the first is now another device, the second is none."""
    log = tmp_path / "log"
    with start(own_dgx, {"NVIDIA_VISIBLE_DEVICES": "0:1"}) as container:
        assert seen(container, own_dgx) == wanted(own_dgx, ["0:1"])
    old_uuid = own_dgx.mig["0:1"].uuid
    own_dgx.make(spec_from_profile("dgx-a100", mig={0: ("3g.20gb", "3g.20gb")}))
    own_dgx.mig = {  # of GPU minor 1, so 138 and on; the two instances are number 1 and 2
        "0:0": MigFacts("MIG-" + "0" * 8, "0", 1, 0, 147, 148),
        "0:1": MigFacts("MIG-" + "0" * 8, "0", 2, 0, 156, 157),
    }
    with start(own_dgx, {"NVIDIA_VISIBLE_DEVICES": "0:1"}) as container:
        found, expected = seen(container, own_dgx), wanted(own_dgx, ["0:1"])
        for what in ("nodes", "opens", "proc", "mounts"):
            assert found[what] == expected[what]
        assert old_uuid not in found["sees"]
    line = refusal(start, own_dgx, {"NVIDIA_VISIBLE_DEVICES": old_uuid}, log)
    assert line.startswith(f"nvct: `{old_uuid}` in env NVIDIA_VISIBLE_DEVICES: ")
    line = refusal(start, own_dgx, {"NVIDIA_VISIBLE_DEVICES": "0:2"}, log)
    assert line.startswith("nvct: `0:2` in env NVIDIA_VISIBLE_DEVICES: ")


def test_a_mig_device_destroyed_while_the_node_is_up(own_dgx: SimNode, start: Start, tmp_path: Path) -> None:
    with start(own_dgx, {"NVIDIA_VISIBLE_DEVICES": "0:1"}):
        pass
    gone = own_dgx.mig["0:1"]
    remove_mig_device(own_dgx, gone)
    line = refusal(start, own_dgx, {"NVIDIA_VISIBLE_DEVICES": gone.uuid}, tmp_path / "log")
    assert f"`{gone.uuid}`" in line
    with start(own_dgx, {"NVIDIA_VISIBLE_DEVICES": "0:1"}) as container:  # the next one has moved up
        assert seen(container, own_dgx) == wanted(own_dgx, ["0:2"])


def remove_mig_device(node: SimNode, mig: MigFacts) -> None:
    gpu = node.gpus[mig.gpu]
    folder = node.path / f"proc/driver/nvidia/capabilities/gpu{gpu.minor}/mig/gi{mig.gi}"
    (folder / f"ci{mig.ci}/access").unlink()
    (folder / f"ci{mig.ci}").rmdir()
    (folder / "access").unlink()
    folder.rmdir()
    state = node.path / STATE / f"gpu.{mig.gpu}"
    lines = state.read_text().splitlines(keepends=True)
    gone = (f"mig.gi {mig.gi} ", f"mig.ci {mig.gi} ")
    state.write_text("".join(line for line in lines if not line.startswith(gone)))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_capability_that_has_got_another_minor(own_dgx: SimNode, start: Start, when: str) -> None:
    """What the cache says of 0:1 is now 0:2's: the two have changed their minors."""
    env = {"NVIDIA_VISIBLE_DEVICES": "0:1"}
    with start(own_dgx, env):
        pass
    one, two = own_dgx.mig["0:1"], own_dgx.mig["0:2"]
    for mig, other in ((one, two), (two, one)):
        folder = own_dgx.path / f"proc/driver/nvidia/capabilities/gpu1/mig/gi{mig.gi}"
        for access, minor in (("access", other.gi_minor), ("ci0/access", other.ci_minor)):
            text = (folder / access).read_text()
            (folder / access).write_text(f"DeviceFileMinor: {minor}\n" + text.split("\n", 1)[1])
    own_dgx.mig = {"0:1": one._replace(gi_minor=two.gi_minor, ci_minor=two.ci_minor)}
    if when == "meanwhile":
        renew_stamp(own_dgx)
    with start(own_dgx, env) as container:
        found, expected = seen(container, own_dgx), wanted(own_dgx, ["0:1"])
        for what in ("nodes", "opens", "proc", "mounts"):
            assert found[what] == expected[what]


def renew_stamp(node: SimNode) -> None:
    """As if the node had changed just after a hook had found its inventory fresh: only the last look can tell."""
    change_kept(node, lambda kept: kept.update(stamp=stamp(str(node.config), settings.load(str(node.config)))))


def test_another_mig_layout_with_the_same_numbers(own_dgx: SimNode, start: Start, tmp_path: Path) -> None:
    """Another tool puts GPU instances of another profile in the place of those that were there, under their ids."""
    own_dgx.make(spec_from_profile("dgx-a100", mig={0: ("2g.10gb@0", "2g.10gb@2")}))
    own_dgx.mig = {  # of GPU minor 1, so 138 and on; slices of a quarter are numbered from 3
        "0:0": MigFacts("MIG-" + "0" * 8, "0", 3, 0, 165, 166),
        "0:1": MigFacts("MIG-" + "0" * 8, "0", 4, 0, 174, 175),
    }
    assert profiles_after_start(own_dgx, start) == ["2g.10gb", "2g.10gb"]
    other = tmp_path / "other"
    create(spec_from_profile("dgx-a100", mig={0: ("1g.10gb@0", "1g.10gb@2")}), other)
    capabilities = "proc/driver/nvidia/capabilities/gpu1"
    shutil.rmtree(own_dgx.path / capabilities)
    shutil.copytree(other / capabilities, own_dgx.path / capabilities)
    shutil.copy(other / STATE / "gpu.0", own_dgx.path / STATE / "gpu.0")
    assert profiles_after_start(own_dgx, start) == ["1g.10gb", "1g.10gb"]


def profiles_after_start(node: SimNode, start: Start) -> list[str]:
    """The profiles of GPU 0's MIG devices in the inventory with which `0:1` has just been given."""
    with start(node, {"NVIDIA_VISIBLE_DEVICES": "0:1"}) as container:
        found, expected = seen(container, node), wanted(node, ["0:1"])
        for what in ("nodes", "opens", "proc", "mounts"):
            assert found[what] == expected[what]
    devices = json.loads(node.cache.read_text())["inventory"]["gpus"][0]["mig_devices"]
    return [device["profile"] for device in devices]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_another_driver(own_dgx: SimNode, start: Start, when: str) -> None:
    """The same node, booted the same, with another driver under an inventory that is otherwise of this moment."""
    with start(own_dgx, GPU_2):
        pass
    old = own_dgx.version
    own_dgx.make(spec_from_profile("dgx-a100", mig=DGX_MIG, driver="580.65.06"))
    renew_stamp(own_dgx)
    if when == "before":
        change_kept(own_dgx, lambda kept: kept["stamp"].update(driver_version=old))
    with start(own_dgx, GPU_2) as container:
        assert seen(container, own_dgx) == wanted(own_dgx, ["2"])


def change_kept(node: SimNode, change: Callable[[Any], object]) -> None:
    kept = json.loads(node.cache.read_text())
    change(kept)
    node.cache.write_text(json.dumps(kept))


def forge(kept: Any) -> None:
    """Whoever believes the inventory hands out GPU 3 for GPU 2."""
    two, three = kept["inventory"]["gpus"][2:4]
    for field in ("uuid", "bus_id", "minor"):
        two[field], three[field] = three[field], two[field]


def test_a_forged_inventory_is_a_trap(own_dgx: SimNode, start: Start) -> None:
    with start(own_dgx, GPU_2):
        pass
    change_kept(own_dgx, forge)
    with start(own_dgx, GPU_2) as container:
        assert seen(container, own_dgx)["nodes"] == wanted(own_dgx, ["3"])["nodes"]


@pytest.mark.parametrize("what", ["gpus", "mig", "settings", "loader_cache"])
def test_a_clock_that_was_put_back(own_dgx: SimNode, start: Start, what: str) -> None:
    """The inventory was made an hour later than what it describes was written, by the clock of now."""
    with start(own_dgx, GPU_2):
        pass
    change_kept(own_dgx, forge)

    def make_later(kept: Any) -> None:
        times = kept["stamp"][what]
        for key in times if isinstance(times, dict) else (2, 3):
            times[key] += 3600 * 10**9

    change_kept(own_dgx, make_later)
    with start(own_dgx, GPU_2) as container:
        assert seen(container, own_dgx) == wanted(own_dgx, ["2"])


UNOPENED = "GPU-????????-????-????-????-????????????"


def unopen(node: SimNode) -> None:
    """As after a boot: nothing has opened the GPUs, and the driver does not know their UUIDs yet."""
    for gpu in node.gpus.values():
        change(node.path / f"proc/driver/nvidia/gpus/{gpu.bus}/information", gpu.uuid, UNOPENED)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_gpus_that_nothing_has_opened(own_dgx: SimNode, start: Start, when: str) -> None:
    with start(own_dgx, GPU_2):
        pass
    unopen(own_dgx)
    if when == "meanwhile":
        renew_stamp(own_dgx)
    for request in ("2", own_dgx.gpus["2"].uuid):
        with start(own_dgx, {"NVIDIA_VISIBLE_DEVICES": request}) as container:
            assert seen(container, own_dgx) == wanted(own_dgx, ["2"])


@pytest.mark.parametrize("opened", [True, False], ids=["opened", "unopened"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_gpus_that_have_changed_their_minors(own_dgx: SimNode, start: Start, when: str, opened: bool) -> None:
    two, three = own_dgx.gpus["2"], own_dgx.gpus["3"]
    with start(own_dgx, {"NVIDIA_VISIBLE_DEVICES": two.uuid}) as container:
        assert seen(container, own_dgx) == wanted(own_dgx, ["2"])
    for index, gpu, minor in (("2", two, three.minor), ("3", three, two.minor)):
        information = own_dgx.path / f"proc/driver/nvidia/gpus/{gpu.bus}/information"
        change(information, f"Device Minor: \t {gpu.minor}\n", f"Device Minor: \t {minor}\n")
        change(own_dgx.path / STATE / f"gpu.{index}", f"\nminor {gpu.minor}\n", f"\nminor {minor}\n")
    if not opened:
        unopen(own_dgx)
    own_dgx.gpus = {**own_dgx.gpus, "2": GpuFacts(two.uuid, three.minor, two.bus)}
    if when == "meanwhile":
        renew_stamp(own_dgx)
    with start(own_dgx, {"NVIDIA_VISIBLE_DEVICES": two.uuid}) as container:
        assert seen(container, own_dgx) == wanted(own_dgx, ["2"])
        assert (container.root / f"dev/nvidia{three.minor}").exists()


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_majors_that_have_changed(own_dgx: SimNode, start: Start, when: str) -> None:
    """nvidia-uvm was loaded again and has got another number."""
    with start(own_dgx, GPU_2):
        pass
    old = own_dgx.majors["nvidia-uvm"]
    new = min(set(range(400, 500)) - set(own_dgx.majors.values()))
    change(own_dgx.path / "proc/devices", f"{old} nvidia-uvm\n", f"{new} nvidia-uvm\n")
    for minor, name in enumerate(("nvidia-uvm", "nvidia-uvm-tools")):
        node = own_dgx.path / "dev" / name
        node.unlink()
        os.mknod(node, 0o020666, os.makedev(new, minor))
    if when == "meanwhile":
        renew_stamp(own_dgx)
    with start(own_dgx, GPU_2) as container:
        expected = wanted(own_dgx, ["2"])
        assert expected["nodes"]["/dev/nvidia-uvm"] == (new, 0)
        assert seen(container, own_dgx) == expected
        assert not container.opens(old, 0)


def test_settings_that_have_changed(own_dgx: SimNode, start: Start, tmp_path: Path) -> None:
    env = {**GPU_2, "NVIDIA_DRIVER_CAPABILITIES": "compute"}
    with start(own_dgx, env):
        pass
    chosen = yaml.safe_load(own_dgx.config.read_text())
    own_dgx.config.write_text(yaml.safe_dump({**chosen, "supported_capabilities": ["utility"]}))
    assert "`compute` in env NVIDIA_DRIVER_CAPABILITIES" in refusal(start, own_dgx, env, tmp_path / "log")
    own_dgx.config.chmod(0o666)
    line = refusal(start, own_dgx, env, tmp_path / "log")
    assert str(own_dgx.config) in line
    assert "0666" in line


@pytest.mark.parametrize(
    "fault", ["writable", "foreign", "link", "damaged", "truncated", "empty", "deep", "endless", "fifo"]
)
def test_an_inventory_that_others_could_have_written(
    own_dgx: SimNode, start: Start, tmp_path: Path, fault: str
) -> None:
    """A forged inventory would hand out GPU 3 for GPU 2."""
    with start(own_dgx, GPU_2):
        pass
    two, three = own_dgx.gpus["2"].uuid, own_dgx.gpus["3"].uuid
    text = own_dgx.cache.read_text()
    forged = text.replace(two, "other").replace(three, two).replace("other", three)
    if fault == "damaged":
        forged = forged.replace('"inventory": {', '"inventory": {"x": 1, ')
    if fault == "truncated":
        forged = forged[: len(forged) // 2]
    own_dgx.cache.write_text({"empty": "", "deep": "[" * 1_000_000}.get(fault, forged))
    if fault == "endless":
        os.truncate(own_dgx.cache, 1 << 40)
    if fault == "fifo":
        own_dgx.cache.unlink()
        os.mkfifo(own_dgx.cache)
    if fault == "writable":
        own_dgx.cache.chmod(0o666)
    if fault == "foreign":
        os.chown(own_dgx.cache, 65534, 65534)
    if fault == "link":
        own_dgx.cache.rename(tmp_path / "forged")
        own_dgx.cache.symlink_to(tmp_path / "forged")
    with start(own_dgx, GPU_2) as container:
        assert seen(container, own_dgx) == wanted(own_dgx, ["2"])
    status = own_dgx.cache.lstat()
    assert (status.st_uid, status.st_mode) == (0, 0o100644)


# /run/nvct as a file system of its own, with something in it.
FULL_RUNS = {
    "no-space": "mount -t tmpfs -o mode=755,size=4k none /run/nvct; head -c 4096 /dev/zero >/run/nvct/full",
    "no-inodes": "mount -t tmpfs -o mode=755,nr_inodes=1 none /run/nvct",
    "read-only": "mount -t tmpfs -o mode=755,ro none /run/nvct",
    "a-folder-in-the-way": 'mount -t tmpfs -o mode=755 none /run/nvct; mkdir "/run/nvct/$1"',
}


@pytest.mark.parametrize("script", FULL_RUNS.values(), ids=FULL_RUNS)
def test_an_inventory_that_cannot_be_kept(own_dgx: SimNode, start: Start, tmp_path: Path, script: str) -> None:
    log = tmp_path / "log"
    hooks = [kernel_hook(own_dgx.path), nvct_hook(own_dgx.path, log)]
    with MountNamespace(f"mkdir -p /run/nvct; {script}", own_dgx.cache.name) as machine:
        for _ in range(2):
            log.unlink(missing_ok=True)
            with start(own_dgx, GPU_2, hooks=hooks, prefix=machine.prefix) as container:
                assert seen(container, own_dgx) == wanted(own_dgx, ["2"])
            (line,) = log.read_text().splitlines()
            assert line.startswith("nvct: warning: every start asks NVML again, since the inventory cannot be kept: ")


def test_an_old_inventory_that_cannot_be_replaced(own_dgx: SimNode, start: Start) -> None:
    """/run has become full since it was kept, and it is not believed for that."""
    with MountNamespace("mkdir -p /run/nvct; mount -t tmpfs -o mode=755,size=1m none /run/nvct") as machine:
        with start(own_dgx, GPU_2, prefix=machine.prefix):
            pass
        own_dgx.cache = Path(f"/proc/{machine.pid}/root{own_dgx.cache}")
        change_kept(own_dgx, forge)
        change_kept(own_dgx, lambda kept: kept["stamp"].update(boot_id="another boot"))
        machine.run("sh", "-c", "head -c 2m /dev/zero >/run/nvct/full || true")
        with start(own_dgx, GPU_2, prefix=machine.prefix) as container:
            assert seen(container, own_dgx) == wanted(own_dgx, ["2"])
        assert "another boot" in own_dgx.cache.read_text()
        assert sorted(path.name for path in own_dgx.cache.parent.iterdir()) == [
            "full",
            "hooks",
            own_dgx.cache.name,
            "lock",
        ]


def test_a_node_without_its_driver(own_dgx: SimNode, start: Start, tmp_path: Path) -> None:
    """The module was unloaded after a start: a container that asks for a GPU is refused, another one starts."""
    with start(own_dgx, GPU_2):
        pass
    (own_dgx.path / "proc/driver/nvidia/version").unlink()
    line = refusal(start, own_dgx, GPU_2, tmp_path / "log")
    assert line.startswith("nvct: ")
    assert "proc/driver/nvidia" in line
    with start(own_dgx, {}) as container:
        assert seen(container, own_dgx) == NOTHING


@pytest.mark.parametrize("answer", ["driver_not_loaded", "version_mismatch", "no_permission"])
def test_an_nvml_that_fails(own_dgx: SimNode, start: Start, tmp_path: Path, answer: str) -> None:
    own_dgx.make(replace(own_dgx.spec, nvml=NvmlBehaviour(init=answer)))
    line = refusal(start, own_dgx, GPU_2, tmp_path / "log")
    assert line.startswith("nvct: ")
    assert len(line) > 40
    assert not own_dgx.cache.exists()
