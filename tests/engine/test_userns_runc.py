"""User namespaces with a real runc: a root engine that maps ids, an ordinary user's engine, and both on one host."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvct.node.cache import cache_path
from nvct.sim.bundle import make_rootfs
from tests.support.bare import MISSING_CALLS
from tests.support.namespaces import CgroupV2, MountNamespace
from tests.support.nodes import SimNode
from tests.support.runc import RuncContainer, StartFailed
from tests.support.trees import read_tree
from tests.support.userns import (
    MAPPED,
    ROOTLESS,
    ROOTLESS_WITHOUT_MOUNTS,
    USER,
    Hooks,
    give,
    make_bundle,
    mapped_container,
    rootless_container,
    run_folder_of,
    running,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes containers for other users: needs root"),
    pytest.mark.skipif(not shutil.which("runc"), reason="no runc on this machine (make setup)"),
]

ENV = {"NVIDIA_VISIBLE_DEVICES": "2,0:1", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
KERNELS = pytest.mark.parametrize("kernel", list(MISSING_CALLS))


@pytest.fixture
def run_folder() -> Iterator[Path]:
    with run_folder_of(USER) as folder:
        yield folder


def wanted_uuids(node: SimNode) -> set[str]:
    return {node.gpus["2"].uuid, node.gpus["0"].uuid, node.mig["0:1"].uuid}


def wanted_numbers(node: SimNode) -> set[tuple[int, int]]:
    caps, uvm = node.majors["nvidia-caps"], node.majors["nvidia-uvm"]
    minors = {node.gpus["2"].minor, node.gpus["0"].minor, 255}
    mig = node.mig["0:1"]
    return {(195, minor) for minor in minors} | {(caps, mig.gi_minor), (caps, mig.ci_minor), (uvm, 0), (uvm, 1)}


def assert_gets_its_devices(container: RuncContainer, node: SimNode) -> None:
    """nvidia-smi lists the wanted devices, and each node can be opened: ENXIO says that only the driver is missing."""
    listing = container.sh("nvidia-smi -L")
    assert {line.rpartition("UUID: ")[2].rstrip(")") for line in listing.splitlines()} == wanted_uuids(node), listing
    assert nodes_in(container) == wanted_numbers(node)
    said = container.sh("for node in /dev/nvidia* /dev/nvidia-caps/*; do test -d $node || head -c1 $node; done")
    assert said.count("No such device or address") == len(said.splitlines()) == len(wanted_numbers(node)), said


def nodes_in(container: RuncContainer) -> set[tuple[int, int]]:
    found = [path.lstat() for path in (container.root / "dev").rglob("nvidia*") if path.is_char_device()]
    return {(os.major(status.st_rdev), os.minor(status.st_rdev)) for status in found}


def assert_all_is_owned_by(container: RuncContainer, uid: int) -> None:
    """Whatever was made in the container belongs to its root; what is mounted on that is the host's."""
    mounts = tuple(path for path in container.mounts() if path != "/")
    for top in ("dev", "etc", "run", "usr"):
        for path, entry in read_tree(container.root / top).items():
            place = f"/{top}{path}"
            if place not in mounts and not place.startswith(("/dev/pts/", "/dev/mqueue/")):
                assert entry.owner == uid, place
    shown = container.root / "proc/driver/nvidia"
    assert shown.stat().st_uid == uid
    for path, entry in read_tree(shown).items():
        if not any(f"/proc/driver/nvidia{path}/".startswith(f"{mount}/") for mount in mounts if "nvidia/" in mount):
            assert entry.owner == uid, path
    # Below what is mounted: the places themselves.
    assert {entry.owner for entry in read_tree(container.bundle / "rootfs").values()} == {uid}


def assert_nothing_is_left(folder: Path) -> None:
    left = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line]
    assert left == []


def know(folder: Path, hooks: Hooks) -> None:
    """Have an inventory kept before a test makes the node useless, also for discovery."""
    with running(make_bundle(folder, hooks(), ENV, 0)):
        pass


@KERNELS
def test_a_root_engine_that_maps_ids(folder: Path, node: SimNode, hooks: Hooks, kernel: str) -> None:
    with mapped_container(folder, node.path, ENV, hooks(kernel=kernel)) as container:
        assert_gets_its_devices(container, node)
        assert_all_is_owned_by(container, MAPPED)
        shown = container.root / "proc/driver/nvidia"
        assert sorted(os.listdir(shown / "gpus")) == sorted(node.gpus[name].bus for name in ("0", "2"))
        assert "ModifyDeviceFiles: 0" in container.sh("cat /proc/driver/nvidia/params")
        assert {f"c {major}:{minor} rw" for major, minor in wanted_numbers(node)} == {
            rule for rule in container.devices_v1() if rule.endswith(" rw")
        }
    assert hooks.said() == ""
    assert_nothing_is_left(folder)


@KERNELS
def test_twice_is_once(folder: Path, node: SimNode, hooks: Hooks, kernel: str) -> None:
    """The same hook runs twice before the program starts; each mount point is there once."""
    stage = hooks(kernel=kernel)["prestart"]
    with mapped_container(folder, node.path, ENV, {"prestart": [*stage, *stage]}) as container:
        assert_gets_its_devices(container, node)
        points = [line.split()[4] for line in Path(f"/proc/{container.pid}/mountinfo").read_text().splitlines()]
        assert len(points) == len(set(points))
    assert hooks.said() == ""


@KERNELS
def test_a_failure_undoes_everything(folder: Path, node: SimNode, hooks: Hooks, kernel: str) -> None:
    bundle = make_bundle(folder, hooks(kernel=kernel), ENV, MAPPED, maps=True)
    (bundle / "rootfs/etc/ld.so.cache").unlink()
    (bundle / "rootfs/etc/ld.so.cache").mkdir()
    before = read_tree(bundle / "rootfs")
    with pytest.raises(StartFailed), running(bundle):
        pass
    assert "write the loader cache: " in hooks.said()
    assert "everything done before was undone" in hooks.said()
    after = {path: found for path, found in read_tree(bundle / "rootfs").items() if path != "/dev/console"}
    assert after == before
    assert_nothing_is_left(folder)


def test_volumes_of_the_hosts_are_not_written_to(folder: Path, node: SimNode, hooks: Hooks) -> None:
    """A folder of the host, mounted where libraries go: root of the container may not write there, nor may the hook."""
    volume = folder / "volume"
    volume.mkdir()
    volume.chmod(0o755)
    bundle = make_bundle(folder, hooks(), ENV, MAPPED, maps=True)
    spec = json.loads((bundle / "config.json").read_text())
    where = f"/usr/lib/{os.uname().machine}-linux-gnu"
    spec["mounts"].append({"destination": where, "source": str(volume), "options": ["bind"]})
    (bundle / "config.json").write_text(json.dumps(spec))
    with pytest.raises(StartFailed), running(bundle):
        pass
    assert f"{where}/" in hooks.said() or "libnvidia-ml.so" in hooks.said()
    assert "Permission denied (EACCES); everything done before was undone" in hooks.said()
    assert list(volume.iterdir()) == []


def test_secrets_of_the_hosts_are_not_read(folder: Path, node: SimNode, hooks: Hooks) -> None:
    """A link of the image leads to a file of the host that root of the container may not read."""
    volume = folder / "secrets"
    volume.mkdir()
    (volume / "secret").write_text("/secret\n")
    (volume / "secret").chmod(0o600)
    make_rootfs(folder / "musl", "busybox")
    bundle = make_bundle(folder, hooks(), ENV, MAPPED, maps=True, rootfs=folder / "musl")
    machine = os.uname().machine
    (folder / f"musl/usr/lib/ld-musl-{machine}.so.1").touch()
    (folder / f"musl/etc/ld-musl-{machine}.path").symlink_to("/mnt/secret")
    give(folder / "musl", MAPPED)
    spec = json.loads((bundle / "config.json").read_text())
    spec["mounts"].append({"destination": "/mnt", "source": str(volume), "options": ["bind"]})
    (bundle / "config.json").write_text(json.dumps(spec))
    with running(bundle):
        pass
    written = (folder / f"musl/etc/ld-musl-{machine}.path").read_text()
    assert "/secret" not in written
    assert "/usr/local/lib" in written


def test_device_programs_of_a_mapped_container(folder: Path, node: SimNode, hooks: Hooks) -> None:
    """cgroup v2: a root engine's hook edits them for a container in a user namespace as for any other."""
    with CgroupV2() as group:
        with running(make_bundle(folder, hooks(), ENV, MAPPED, maps=True), group.prefix) as container:
            assert_gets_its_devices(container, node)
        off = hooks(settings={"cgroups": False})
        with running(make_bundle(folder, off, ENV, MAPPED, maps=True), group.prefix) as container:
            assert "Operation not permitted" in container.sh("head -c1 /dev/nvidia3")


@KERNELS
def test_an_ordinary_users_engine(folder: Path, node: SimNode, hooks: Hooks, run_folder: Path, kernel: str) -> None:
    with rootless_container(folder, node.path, ENV, hooks(kernel=kernel)) as container:
        assert_gets_its_devices(container, node)
        assert_all_is_owned_by(container, USER)
        assert "ModifyDeviceFiles: 0" in container.sh("cat /proc/driver/nvidia/params")
    assert hooks.said() == ""
    assert_nothing_is_left(folder)


def test_an_engine_without_a_mount_namespace(folder: Path, node: SimNode, hooks: Hooks, run_folder: Path) -> None:
    """Nothing can be detached from the mount namespace that runc runs in: the host's files are taken inside."""
    with rootless_container(folder, node.path, ENV, hooks(shown=None), ROOTLESS_WITHOUT_MOUNTS) as container:
        assert nodes_in(container) == wanted_numbers(node)
        assert container.sh("head -c1 /dev/nvidia3").endswith("No such device or address\n")
        assert (container.root / "usr/bin/nvidia-smi").stat().st_size > 0
    assert hooks.said() == "nvct: warning: the container has no /proc/driver/nvidia: nothing to cover there\n"


def test_rootful_and_rootless_at_once(folder: Path, node: SimNode, hooks: Hooks, run_folder: Path) -> None:
    """Two engines, one hook, the same settings; the rootless one reads what root's first start has kept."""
    stages = hooks()
    with (
        mapped_container(folder, node.path, ENV, stages) as mapped,
        rootless_container(folder, node.path, ENV, stages) as rootless,
        running(make_bundle(folder, stages, ENV, 0)) as plain,
    ):
        for container, uid in ((mapped, MAPPED), (rootless, USER), (plain, 0)):
            assert_gets_its_devices(container, node)
            assert_all_is_owned_by(container, uid)
    assert hooks.said() == ""
    assert not (run_folder / "nvct").exists()


def test_a_user_keeps_an_inventory_of_his_own(
    folder: Path, node: SimNode, hooks: Hooks, run_folder: Path, tmp_path: Path
) -> None:
    """The first start of all is a rootless one; its environment does not say where to keep what it found."""
    node.forget()
    evil = folder / "evil"
    evil.mkdir(mode=0o777)
    evil.chmod(0o777)
    stages = hooks(env=[f"XDG_RUNTIME_DIR={evil}", f"TMPDIR={evil}", f"HOME={evil}"])
    with rootless_container(folder, node.path, ENV, stages) as container:
        assert_gets_its_devices(container, node)
    own = Path(cache_path(str(node.config), f"{run_folder}/nvct"))
    first = own.stat()
    assert (first.st_uid, first.st_mode & 0o777) == (USER, 0o644)
    with rootless_container(folder, node.path, ENV, stages):
        assert own.stat().st_mtime_ns == first.st_mtime_ns
    assert list(evil.iterdir()) == []
    assert not node.cache.exists()
    assert hooks.said() == ""


def test_an_inventory_of_roots_that_is_wrong(folder: Path, node: SimNode, hooks: Hooks, run_folder: Path) -> None:
    """Its stamp is right and its GPU is not: root's cannot be removed, so the user's own takes its place."""
    know(folder, hooks)
    kept_by_root = json.loads(node.cache.read_text())
    (gpu,) = (gpu for gpu in kept_by_root["inventory"]["gpus"] if gpu["uuid"] == node.gpus["2"].uuid)
    gpu["minor"] = 6
    node.cache.write_text(json.dumps(kept_by_root))
    with rootless_container(folder, node.path, ENV, hooks()) as container:
        assert_gets_its_devices(container, node)
    assert (run_folder / "nvct").stat().st_uid == USER
    assert json.loads(node.cache.read_text()) == kept_by_root
    node.forget()


@pytest.fixture
def closed_group() -> Iterator[list[str]]:
    """A command that runs others in a device cgroup (v1) which allows what every container has, and no GPU."""
    group = Path(f"/sys/fs/cgroup/devices/nvct-userns-{os.getpid()}")
    if not (group.parent / "devices.list").exists():
        pytest.skip("no device cgroup v1 on this machine")
    group.mkdir()
    try:
        (group / "devices.deny").write_text("a")
        for rule in ("c 1:* rwm", "c 5:* rwm", "c 136:* rwm", "c 10:* rwm"):
            (group / "devices.allow").write_text(rule)
        yield ["sh", "-c", f'echo 0 > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        group.rmdir()


def test_rules_that_a_user_cannot_change(
    folder: Path, node: SimNode, hooks: Hooks, run_folder: Path, closed_group: list[str]
) -> None:
    """The container starts, the host's rules decide, and a warning says so."""
    know(folder, hooks)
    prefix = [*closed_group, *ROOTLESS]
    with rootless_container(folder, node.path, ENV, hooks(), prefix) as container:
        assert nodes_in(container) == wanted_numbers(node)
    said = hooks.said()
    assert said.startswith("nvct: warning: cannot open devices.allow of /sys/fs/cgroup/devices/nvct-userns-")
    assert "(EACCES); a rootless engine cannot change device rules" in said
    assert said.count("\n") == 1


def test_programs_that_a_user_cannot_change(folder: Path, node: SimNode, hooks: Hooks, run_folder: Path) -> None:
    """The same with cgroup v2."""
    with (
        CgroupV2() as group,
        rootless_container(folder, node.path, ENV, hooks(), [*group.prefix, *ROOTLESS]) as container,
    ):
        assert_gets_its_devices(container, node)
    assert "BPF_PROG_QUERY" in hooks.said()
    assert "(EPERM); a rootless engine cannot change device rules" in hooks.said()


def test_outside_of_user_namespaces_rules_must_be_changed(folder: Path, node: SimNode, hooks: Hooks) -> None:
    """What a rootless engine cannot do is an error for root: it would be a container without its devices."""
    program = """
import os
from nvct.inject import cgroup
def denied(*arguments):
    raise PermissionError(1, "Operation not permitted", "devices.allow")
cgroup._Version1._open_for_writing = denied
"""
    with pytest.raises(StartFailed), running(make_bundle(folder, hooks(program=program), ENV, MAPPED, maps=True)):
        pass
    assert "cannot open the device cgroup" in hooks.said()


TRACE = ["strace", "-f", "-e", "trace=%file,%process,bpf,write", "-s", "200"]


@pytest.mark.skipif(not shutil.which("strace"), reason="no strace on this machine (make setup)")
def test_with_cgroups_off_none_is_opened(folder: Path, node: SimNode, hooks: Hooks) -> None:
    traces = {}
    for switch in (True, False):
        log = folder / f"trace-{switch}"
        stages = hooks(settings={"cgroups": switch}, under=[*TRACE, "-o", str(log)])
        for _ in range(2):  # the second finds a fresh inventory
            with mapped_container(folder, node.path, ENV, stages) as container:
                assert nodes_in(container) == wanted_numbers(node)
        traces[switch] = log.read_text()
    assert "devices.allow" in traces[True]
    for word in ("/sys/fs/cgroup", "devices.allow", "devices.list", "bpf("):
        assert word not in traces[False]


@pytest.mark.skipif(not shutil.which("strace"), reason="no strace on this machine (make setup)")
def test_a_hook_with_a_fresh_inventory_starts_no_process(folder: Path, node: SimNode, hooks: Hooks) -> None:
    log = folder / "trace-processes"
    stages = hooks(under=[*TRACE, "-o", str(log)])
    with mapped_container(folder, node.path, ENV, stages):
        first = log.read_text()
    with mapped_container(folder, node.path, ENV, stages):
        second = log.read_text()
    for word in ("clone", "fork"):
        assert word not in second
    # The one process of a first start has ended before the hook goes on.
    assert "clone" in first or "fork" in first
    pids = {line.split()[0] for line in first.splitlines()}
    assert len(pids) >= 2
    for pid in pids:
        assert f"{pid} +++ exited with 0 +++" in first.replace("  ", " ")


@pytest.mark.parametrize("good", [True, False])
def test_nothing_is_imported_in_the_container(folder: Path, node: SimNode, hooks: Hooks, good: bool) -> None:
    """After setns the paths that Python would import from are the container's."""
    found = folder / f"imports-{good}"
    program = f"""
import atexit, sys
from nvct.inject import syscalls
names = []
enter = syscalls.setns
def setns(*arguments):
    names.extend(sys.modules)
    out.write("entered ")
    enter(*arguments)
out = open({str(found)!r}, "w")
syscalls.setns = setns
atexit.register(lambda: out.write(repr(sorted(set(sys.modules) - set(names)))))
"""
    bundle = make_bundle(folder, hooks(program=program), ENV, MAPPED, maps=True)
    if good:
        with running(bundle):
            pass
    else:
        (bundle / "rootfs/usr/bin/nvidia-smi").mkdir()
        with pytest.raises(StartFailed), running(bundle):
            pass
    assert found.read_text() == "entered []"


@KERNELS
def test_options_that_a_user_cannot_lift_stay(
    folder: Path, node: SimNode, hooks: Hooks, run_folder: Path, kernel: str
) -> None:
    """Driver files and sockets on file systems that root has mounted read-only: a user namespace keeps that."""
    script = "mount --bind {0} {0}; mount -o remount,bind,ro,nosuid,nodev,noatime {0}"
    places = [script.format(node.path / name) for name in ("usr", "run")]
    with MountNamespace("; ".join(places)) as host:
        stages = hooks(kernel=kernel)
        with rootless_container(folder, node.path, ENV, stages, [*host.prefix, *ROOTLESS]) as container:
            assert_gets_its_devices(container, node)
            options = container.mounts()["/usr/bin/nvidia-smi"]
            assert options >= {"ro", "nosuid", "nodev", "noatime"}
            socket = container.mounts()["/run/nvidia-persistenced/socket"]
            assert socket >= {"ro", "nosuid", "nodev", "noexec"}
    assert hooks.said() == ""


@KERNELS
def test_nodes_on_a_nodev_file_system(folder: Path, node: SimNode, hooks: Hooks, run_folder: Path, kernel: str) -> None:
    """Root lifts nodev for its containers; a user namespace cannot, and such nodes would be of no use."""
    know(folder, hooks)
    dev = node.path / "dev"
    with MountNamespace(f"mount --bind {dev} {dev}; mount -o remount,bind,nodev {dev}") as host:
        # Old kernels take the nodes inside, where for a container with a user namespace all options are locked.
        maps = kernel != "5.1"
        bundle = make_bundle(folder, hooks(kernel=kernel), ENV, MAPPED if maps else 0, maps)
        with running(bundle, host.prefix) as container:
            assert_gets_its_devices(container, node)
        assert hooks.said() == ""
        bundle = make_bundle(folder, hooks(kernel=kernel), ENV, USER)
        before = read_tree(bundle / "rootfs")
        with pytest.raises(StartFailed), running(bundle, [*host.prefix, *ROOTLESS]):
            pass
        assert f"{dev}/nvidiactl lies on a file system that is mounted nodev" in hooks.said()
        after = {path: found for path, found in read_tree(bundle / "rootfs").items() if path != "/dev/console"}
        assert after == before


def test_where_mounts_below_proc_are_refused(folder: Path, node: SimNode, hooks: Hooks) -> None:
    program = """
from nvct.inject import syscalls
attach = syscalls.move_mount
def move_mount(mount, target, about):
    if about == "/proc/driver/nvidia":
        raise PermissionError(1, "Operation not permitted", about)
    attach(mount, target, about)
syscalls.move_mount = move_mount
"""
    with pytest.raises(StartFailed), mapped_container(folder, node.path, ENV, hooks(program=program)):
        pass
    assert "set `mask_proc: false`" in hooks.said()
    hooks.log.write_text("")
    stages = hooks(program=program, settings={"mask_proc": False})
    with mapped_container(folder, node.path, ENV, stages) as container:
        assert nodes_in(container) == wanted_numbers(node)
        assert len(os.listdir(container.root / "proc/driver/nvidia/gpus")) == 8
    assert "mask_proc is off" in hooks.said()
