"""Each known flaw of the established stack, as an attack: on nvct under real runc, and on what falls to it.

The flaws: NVIDIA's security bulletins for the Container Toolkit (CVE-2024-0132 to -0137, CVE-2025-23359, -23266,
-23267) and public issues. The attack is an image; it is shown to work on a few naive lines that do what the flawed
part did. CVE-2026-24260, of which no more is public than that it is a race, is answered by test_race.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nvct import settings
from nvct.errors import ConfigError
from nvct.inject import syscalls
from nvct.inject.rootfs import ConfinedRoot
from nvct.sim.bundle import config, write_config
from tests.support.bare import MISSING_CALLS
from tests.support.cage import caged
from tests.support.canary import Canary
from tests.support.expect import USUAL_MOUNTS, seen, wanted
from tests.support.namespaces import MountNamespace
from tests.support.nodes import SimNode
from tests.support.runc import (
    HOOK,
    PYTHON,
    TREE,
    RuncContainer,
    Start,
    StartFailed,
    hooks_of,
    kernel_hook,
    make_root,
    nvct_hook,
)

pytestmark = pytest.mark.engine

ENV = {"NVIDIA_VISIBLE_DEVICES": "0:3,6"}
DEVICES = ["0:3", "6"]
UP = "../" * 20
LIB = f"usr/lib/{os.uname().machine}-linux-gnu"
VERSION = "550.163.01"


@pytest.fixture
def rootfs(tmp_path: Path, static_programs: Path, runc: None) -> Path:
    make_root(tmp_path / "rootfs", "debian", True, static_programs)
    return tmp_path / "rootfs"


def started(start: Start, node: SimNode, rootfs: Path) -> str:
    """Start a container with this root and end it: "" or what nvct said. When it starts it has just what it should."""
    try:
        with start(node, ENV, rootfs=rootfs) as container:
            expected = wanted(node, DEVICES)
            assert container.look(node.device_numbers()).opens == expected["opens"]
            own = {identity(path) for path in node.path.rglob("*")}
            points = container.mounts().keys() - USUAL_MOUNTS - {"/proc/driver/nvidia"}
            assert {point for point in points if identity(container.root / point[1:]) not in own} == set()
            assert len(points) > 20
        return ""
    except StartFailed as failure:
        assert "nvct: " in str(failure)
        return str(failure)


def identity(path: Path) -> tuple[int, int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino, status.st_rdev


def naively(rootfs: Path, act: Callable[[str], object]) -> None:
    """Do it in a mount namespace of its own; what is mounted there is gone afterwards."""

    def caged_act() -> str:
        act(str(rootfs))
        return "done"

    assert caged(caged_act) == "done"


# CVE-2024-0132 and CVE-2025-23359: libraries that the image brings are mounted, by their paths, over the driver's.

COMPAT = "usr/local/cuda/compat"


def compat_by_paths(rootfs: str) -> None:
    for name in os.listdir(f"{rootfs}/{COMPAT}"):
        os.makedirs(f"{rootfs}/taken/{name}")
        syscalls.mount(f"{rootfs}/{COMPAT}/{name}", f"{rootfs}/taken/{name}", "", syscalls.MS_BIND, "", name)


@pytest.mark.parametrize(
    "text", ["{canary}/folder", UP + "{canary}/folder", "/", UP], ids=["absolute", "up", "root", "up-root"]
)
@pytest.mark.parametrize("name", ["libcuda.so.999.1", "."], ids=["library", "folder"])
def test_cve_2024_0132_no_mount_comes_from_the_container(
    dgx: SimNode, start: Start, rootfs: Path, canary: Canary, text: str, name: str
) -> None:
    place = rootfs / COMPAT / name
    place.parent.mkdir(parents=True)
    place.symlink_to(text.format(canary=canary.path))
    assert started(start, dgx, rootfs) == ""  # `started` compares every mount with the node's file of that name
    assert canary.harm() == []


def test_cve_2024_0132_works_by_paths(rootfs: Path, canary: Canary) -> None:
    (rootfs / COMPAT).mkdir(parents=True)
    (rootfs / COMPAT / "libcuda.so.999.1").symlink_to(canary.folder)

    def host_file_in_the_container(root: str) -> None:
        compat_by_paths(root)
        assert Path(f"{root}/taken/libcuda.so.999.1/kept").read_text() == "folder of the host"

    naively(rootfs, host_file_in_the_container)


# CVE-2024-0133: places for mounts are made outside of the container. CVE-2024-0134: links are.

FIRMWARE = f"usr/lib/firmware/nvidia/{VERSION}"
LINKED = {
    "libraries": LIB,
    "programs": "usr/bin/nvidia-smi",
    "firmware": "usr/lib/firmware",
    "firmware of the version": FIRMWARE,
    "socket": "run/nvidia-persistenced",
    "run": "run",
    "a development name": f"{LIB}/libcuda.so",
    "a soname": f"{LIB}/libcuda.so.1",
    "a library": f"{LIB}/libcuda.so.{VERSION}",
}
WAYS = {
    "absolute": "{canary}/folder",
    "up": UP + "{canary}/folder",
    "chain": "../one",
    "root": "/",
    "dangling": "{canary}/none",
}


def put_link(rootfs: Path, where: str, text: str, canary: Canary) -> None:
    place = rootfs / where
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(text.format(canary=canary.path))
    (place.parent.parent / "one").symlink_to("two")
    (place.parent.parent / "two").symlink_to(UP + str(canary.folder))


def files_and_links_by_paths(rootfs: str) -> None:
    for path in (
        f"{LIB}/libcuda.so.{VERSION}",
        f"{FIRMWARE}/gsp.bin",
        "usr/bin/nvidia-smi",
        "run/nvidia-persistenced/socket",
    ):
        os.makedirs(os.path.dirname(f"{rootfs}/{path}"), exist_ok=True)
        open(f"{rootfs}/{path}", "a").close()
    for name in ("libcuda.so", "libcuda.so.1"):
        if not os.path.exists(f"{rootfs}/{LIB}/{name}"):
            os.symlink(f"libcuda.so.{VERSION}", f"{rootfs}/{LIB}/{name}")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("where", LINKED.values(), ids=LINKED)
def test_cve_2024_0133_and_0134_nothing_is_made_outside(
    dgx: SimNode, start: Start, rootfs: Path, canary: Canary, where: str, way: str
) -> None:
    put_link(rootfs, where, way, canary)
    said = started(start, dgx, rootfs)
    assert canary.harm() == []
    assert said == "" or "everything done before was undone" in said


@pytest.mark.parametrize("where", [LIB, FIRMWARE, "usr/lib/firmware", "run/nvidia-persistenced"])
@pytest.mark.parametrize("way", ["absolute", "up", "chain"])
def test_cve_2024_0133_and_0134_work_by_paths(rootfs: Path, canary: Canary, where: str, way: str) -> None:
    put_link(rootfs, where, WAYS[way], canary)
    naively(rootfs, files_and_links_by_paths)
    assert canary.harm() != []


# CVE-2024-0135, -0136, -0137: the image's or the host's ldconfig runs in the container, or the other way round.

SCRIPT = "#!/usr/bin/sh\n/usr/bin/mkdir /was-run\n"


def plant_programs(rootfs: Path) -> None:
    """Programs under every name that a tool of this kind might run in a container."""
    (rootfs / "usr/sbin").mkdir(exist_ok=True)
    (rootfs / "sbin").symlink_to("usr/sbin")
    for name in ("sbin/ldconfig", "sbin/ldconfig.real", "bin/ldconfig", "bin/python3", "bin/modprobe", "sbin/modprobe"):
        (rootfs / "usr" / name).write_text(SCRIPT)
        (rootfs / "usr" / name).chmod(0o755)


def test_cve_2024_0135_to_0137_no_program_of_the_image_runs(dgx: SimNode, start: Start, rootfs: Path) -> None:
    plant_programs(rootfs)
    for inventory in ("none", "fresh"):
        if inventory == "none":
            dgx.forget()
        assert started(start, dgx, rootfs) == ""
        assert not (rootfs / "was-run").exists()


def test_cve_2024_0135_to_0137_work_by_running_it(rootfs: Path) -> None:
    plant_programs(rootfs)
    subprocess.run(["/usr/sbin/chroot", rootfs, "/sbin/ldconfig"], check=True)
    assert (rootfs / "was-run").exists()


def test_cve_2024_0136_no_setting_names_a_program(tmp_path: Path) -> None:
    """The established tool's `ldconfig = "/sbin/ldconfig"`, without the @, ran the image's."""
    file = tmp_path / "config.yaml"
    file.write_text("ldconfig: /sbin/ldconfig\n")
    with pytest.raises(ConfigError, match="unknown setting 'ldconfig'"):
        settings.load(str(file))
    assert [name for name in settings.to_json(settings.Settings()) if "config" in name or "program" in name] == []


# What system calls the hook makes: one trace of a start, for all that must never be in one.


class Trace:
    """Lines of strace. `inside`: those after the hook has entered the container's mount namespace."""

    def __init__(self, text: str) -> None:
        self.lines = [line.split(" ", 1)[-1].strip() for line in text.splitlines()]
        entered = next(number for number, line in enumerate(self.lines) if line.startswith("setns("))
        self.inside = self.lines[entered:]

    def calls(self, *names: str) -> list[str]:
        return [line for line in self.lines if line.startswith(tuple(f"{name}(" for name in names))]


def trace(dgx: SimNode, start: Start, tmp_path: Path, kernel: str) -> tuple[Trace, RuncContainer]:
    if not shutil.which("strace"):
        pytest.skip("strace is not installed: run tools/setup.sh")
    file = tmp_path / "trace"
    missing = ",".join(MISSING_CALLS[kernel])
    strace = [shutil.which("strace") or "", "-f", "-qq", "-v", "-s", "300", "-o", str(file), "-e", "trace=all"]
    strace += ["-e", f"inject={missing}:error=ENOSYS"] if missing else []
    with start(dgx, ENV, hooks=[kernel_hook(dgx.path), nvct_hook(dgx.path, under=strace)]) as container:
        assert seen(container, dgx) == wanted(dgx, DEVICES)
    return Trace(file.read_text()), container


@pytest.mark.parametrize("kernel", MISSING_CALLS)
def test_what_the_hook_never_does(dgx: SimNode, start: Start, tmp_path: Path, kernel: str) -> None:
    with start(dgx, ENV):  # the inventory is fresh now
        pass
    traced, container = trace(dgx, start, tmp_path, kernel)
    # It executes itself, a grep over config.json, and Python, all of them on the host (CVE-2024-0135 to -0137, residual
    # weakness 6).
    assert [line.split('"')[1] for line in traced.calls("execve", "execveat")] == [str(HOOK), "/bin/grep", PYTHON]
    assert len(traced.calls("clone", "clone3", "fork", "vfork")) <= 2
    acting = ("execve(", "execveat(", "clone(", "clone3(", "fork(", "vfork(")
    assert [line for line in traced.inside if line.startswith(acting)] == []
    # It changes no mode and no owner but of files that it has just made (residual weakness 4).
    assert traced.calls("chmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchown", "fchownat") == []
    # It mounts by descriptor only: numbers, below its own /proc/self/fd (CVE-2024-0132, residual weaknesses 2 and 5).
    for line in traced.calls("mount", "umount2"):
        assert re.match(r'(mount\("(\d*|tmpfs)", "\d+", |umount2\("\d+", )', line), line
    for line in traced.calls("move_mount"):
        assert re.match(r'move_mount\(\d+, "", \d+, "", ', line), line
    assert len(traced.calls("move_mount", "mount")) > 20
    # In the container it opens no absolute path, and none that has more than a name, but by openat2 in the root.
    for line in traced.inside:
        if line.startswith(
            ("openat(", "mkdirat(", "symlinkat(", "unlinkat(", "renameat(", "newfstatat(", "readlinkat(")
        ):
            paths = re.findall(r'"([^"]*)"', line.partition(" = ")[0])
            # Of a link its text comes first, of a reading its text last.
            places = paths[1:] if line.startswith("symlinkat(") else paths[: 1 if line.startswith("readlinkat(") else 2]
            # On old kernels what the host gives is opened in here, before anything of the container.
            host_sources = kernel == "5.1" and "O_PATH" in line and str(dgx.path) in line
            # What it may: its own tmpfs, and on old kernels what the host gives, before anything of the container.
            assert host_sources or all(
                "/" not in path or path.startswith(("capabilities/", "gpus/")) for path in places
            ), line
    # config.json is read, and never written (residual weakness 8).
    opened = [line for line in traced.calls("openat", "open") if "config.json" in line]
    assert opened and all("O_RDONLY" in line for line in opened)
    # Nothing of its own is left in the container (residual weakness 3).
    assert [path for path in container.image() if "nvct" in path] == []


def test_children_of_the_hook_have_no_environment(dgx: SimNode, start: Start, tmp_path: Path) -> None:
    """Without a fresh inventory it starts a process that discovers the node (residual weakness 6)."""
    dgx.forget()
    traced, _ = trace(dgx, start, tmp_path, "today")
    own, _grep, _python, *children = traced.calls("execve")
    assert children and str(TREE) in children[0]
    for line in children:
        assert re.search(r"\], \[\](\) | <unfinished)", line), line
    assert not re.search(r"\], \[\]\) ", own)  # the hook itself had one


# CVE-2025-23266: a hook that inherits the image's environment runs the image's library, before any code of its own.

CONSTRUCTOR = '__attribute__((constructor)) static void run(void) {{ creat("{mark}", 0600); }}'


def preloading(rootfs: Path, mark: Path) -> dict[str, str]:
    build = ["cc", "-w", "-shared", "-fPIC", "-o", str(rootfs / "poc.so"), "-x", "c", "-"]
    subprocess.run(build, input=CONSTRUCTOR.format(mark=mark), text=True, check=True)
    return {**ENV, "LD_PRELOAD": "/proc/self/cwd/poc.so"}


def test_cve_2025_23266_the_images_library_is_not_run(dgx: SimNode, start: Start, rootfs: Path, tmp_path: Path) -> None:
    mark = tmp_path / "owned"
    env = preloading(rootfs, mark)
    for hooks in (None, [kernel_hook(dgx.path), nvct_hook(dgx.path)]):
        with start(dgx, env, rootfs=rootfs, hooks=hooks):
            assert not mark.exists()


def test_cve_2025_23266_works_on_a_hook_without_env(rootfs: Path, tmp_path: Path) -> None:
    mark = tmp_path / "owned"
    spec = config(["/usr/bin/true"], preloading(rootfs, mark), {})
    # Here the hook is run with the image's environment, in the image's root folder.
    script = f"cd {rootfs} && exec /bin/true"
    spec["hooks"] = {"createContainer": [{"path": "/bin/sh", "args": ["sh", "-c", script]}]}
    write_config(tmp_path, spec)
    subprocess.run(["runc", "--root", tmp_path / "state", "run", "--bundle", tmp_path, "nvct-cve"], capture_output=True)
    assert mark.exists()


# CVE-2025-23267: what ldconfig reads and writes leads out of the container.

CACHE_LINKS = {
    "etc/ld.so.cache": (
        "{canary}/file",
        "{canary}/folder/kept",
        UP + "{canary}/file",
        "{canary}/none",
        "/proc/self/root{canary}/file",
    ),
    "etc": ("{canary}/etc", UP + "{canary}/etc"),
    "etc/ld.so.conf.d": ("{canary}/folder",),
    "etc/ld.so.conf": ("{canary}/file",),
    "run": ("{canary}/folder",),
}


@pytest.mark.parametrize(("where", "text"), [(where, text) for where, texts in CACHE_LINKS.items() for text in texts])
def test_cve_2025_23267_the_loader_cache_stays_inside(
    dgx: SimNode, start: Start, rootfs: Path, canary: Canary, where: str, text: str
) -> None:
    put_link(rootfs, where, text, canary)
    if where == "etc":
        (rootfs / "usr/lib/debian").mkdir()  # runc makes the target of what it mounts there, not nvct
    said = started(start, dgx, rootfs)
    assert canary.harm() == []
    assert said == "" or "everything done before was undone" in said


def test_cve_2025_23267_works_by_paths(rootfs: Path, canary: Canary) -> None:
    put_link(rootfs, "etc/ld.so.cache", "{canary}/file", canary)
    naively(rootfs, lambda root: Path(f"{root}/etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1"))
    assert canary.harm() != []


# Issue 697 and residual weakness 7: mounts that propagate to the host and stay there.

VOLUME = {"/usr/lib": "required", "/usr/lib/firmware": "optional"}


def bundle_with_volume(
    tmp_path: Path, rootfs: Path, node: SimNode, target: str, hooks: dict[str, list[dict[str, object]]]
) -> Path:
    """A bundle whose `target` is a volume with shared propagation: the folder `volume` beside it."""
    shutil.copytree(rootfs / target[1:], tmp_path / "volume", symlinks=True) if (rootfs / target[1:]).exists() else None
    (tmp_path / "volume").mkdir(exist_ok=True)
    spec = config(["/usr/bin/true"], ENV, hooks)
    spec["mounts"].append(
        {"destination": target, "type": "bind", "source": f"{tmp_path}/volume", "options": ["rbind", "rshared"]}
    )
    spec["linux"]["rootfsPropagation"] = "rshared"
    write_config(tmp_path, spec)
    return tmp_path


def run_shared(bundle: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run it where all mounts are shared and the root is a mount, as on a usual host; the host's mounts afterwards."""
    with MountNamespace(f"mount --make-rshared /; mount --bind {bundle}/rootfs {bundle}/rootfs") as host:
        run = ["runc", "--root", f"{bundle}/state", "run", "--bundle", str(bundle), "nvct-shared"]
        done = subprocess.run([*host.prefix, *run], capture_output=True, text=True)
        table = subprocess.run(
            [*host.prefix, "cat", "/proc/self/mountinfo"], check=True, capture_output=True, text=True
        )
    points = [line.split()[4] for line in table.stdout.splitlines()]
    return done, [point for point in points if point.startswith(f"{bundle}/") and point != f"{bundle}/rootfs"]


@pytest.mark.parametrize(("target", "kind"), VOLUME.items())
def test_issue_697_no_mount_reaches_the_host(
    dgx: SimNode, rootfs: Path, tmp_path: Path, target: str, kind: str
) -> None:
    bundle = bundle_with_volume(tmp_path, rootfs, dgx, target, hooks_of(dgx.path))
    done, mounts = run_shared(bundle)
    assert mounts == []
    if kind == "required":
        assert done.returncode != 0
        assert "lies on a volume with shared propagation" in done.stderr
        assert "everything done before was undone" in done.stderr
        assert read_names(tmp_path / "volume") == read_names(rootfs / target[1:])
    else:
        assert (done.returncode, done.stderr) == (0, "")


def read_names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_issue_697_happens_by_paths(dgx: SimNode, rootfs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script = 'pid=$(sed "s/.*\\"pid\\": *\\([0-9]*\\).*/\\1/"); '
    script += f"exec nsenter -t $pid -m mount --bind {tmp_path}/file {rootfs}/usr/lib/libc-marker.so"
    hooks = {"prestart": [{"path": "/bin/sh", "args": ["sh", "-c", script]}]}
    (rootfs / "usr/lib/libc-marker.so").touch()
    done, mounts = run_shared(bundle_with_volume(tmp_path, rootfs, dgx, "/usr/lib", hooks))
    assert mounts == [f"{tmp_path}/volume/libc-marker.so"], done.stderr


# Residual weakness 1: whether something exists is asked of the host.


def test_whether_a_file_exists_is_asked_of_the_container(rootfs: Path, canary: Canary) -> None:
    (rootfs / "way").symlink_to(canary.path)
    (rootfs / "file").touch()
    root = ConfinedRoot(os.open(rootfs, os.O_PATH))
    assert root.exists("/file")
    assert not root.exists("/way/file")
    assert os.path.exists(f"{rootfs}/way/file")  # by path strings
    root.close()


# Residual weakness 10: Python's own ways in.


def test_the_hooks_interpreter_is_isolated() -> None:
    """-I leaves out the environment, the current folder and the user's packages, -S all other packages."""
    for hook in (TREE / "hooks").iterdir():
        first = hook.read_text().partition("\n")[0]
        assert first == "#!/usr/bin/python3 -IS" or first.endswith("sh"), f"{hook} begins with {first!r}"
