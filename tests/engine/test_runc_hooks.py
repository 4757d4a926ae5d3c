"""The hook as runtimes call it: twice, on old kernels, with failing steps, in a hostile environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from ast import literal_eval
from pathlib import Path

import pytest

from tests.support.bare import MISSING_CALLS
from tests.support.expect import FOLDERS, seen, wanted
from tests.support.nodes import SimNode
from tests.support.runc import HOOK, PYTHON, TREE, Start, StartFailed, kernel_hook, make_root, nvct_hook
from tests.support.trees import read_tree

pytestmark = pytest.mark.engine

ENV = {"NVIDIA_VISIBLE_DEVICES": "0:3,6", "NVIDIA_DRIVER_CAPABILITIES": "utility,video,display,compat32"}
DEVICES = ["0:3", "6"]
CAPABILITIES = ("utility", "video", "display", "compat32")

OLD_KERNELS = {kernel: calls for kernel, calls in MISSING_CALLS.items() if calls}


@pytest.mark.parametrize("family", ["debian", "lib64", "busybox"])
def test_twice_is_once(dgx: SimNode, start: Start, cgroups: list[str], family: str) -> None:
    """As under podman with a hooks folder and docker with --gpus at once."""
    hooks = [kernel_hook(dgx.path), nvct_hook(dgx.path), kernel_hook(dgx.path), nvct_hook(dgx.path)]
    with start(dgx, ENV, family=family, prefix=cgroups, hooks=hooks) as container:
        assert seen(container, dgx) == wanted(dgx, DEVICES, CAPABILITIES, family)
        mountinfo = Path(f"/proc/{container.pid}/mountinfo").read_text()
        points = [line.split()[4] for line in mountinfo.splitlines()]
        assert len(points) == len(set(points))  # nothing is mounted over itself


def test_the_second_start_of_a_container_writes_nothing(
    dgx: SimNode, start: Start, static_programs: Path, tmp_path: Path
) -> None:
    rootfs = tmp_path / "rootfs"
    make_root(rootfs, "debian", True, static_programs)
    with start(dgx, ENV, rootfs=rootfs):
        pass
    first = read_tree(rootfs), times_of(rootfs)
    with start(dgx, ENV, rootfs=rootfs) as container:
        assert container.look(dgx.device_numbers()).uuids == wanted(dgx, DEVICES)["sees"]
    assert (read_tree(rootfs), times_of(rootfs)) == first


def times_of(rootfs: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in rootfs.rglob("*")}


def test_a_later_start_with_fewer_devices(dgx: SimNode, start: Start, static_programs: Path, tmp_path: Path) -> None:
    """What the first start left in the image gives the second one nothing."""
    rootfs = tmp_path / "rootfs"
    make_root(rootfs, "debian", True, static_programs)
    with start(dgx, {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"}, rootfs=rootfs):
        pass
    with start(dgx, {"NVIDIA_VISIBLE_DEVICES": "0:3", "NVIDIA_DRIVER_CAPABILITIES": "utility"}, rootfs=rootfs) as now:
        expected = wanted(dgx, ["0:3"], ("utility",))
        found = seen(now, dgx)
        for what in ("nodes", "mounts", "opens", "sees", "proc"):
            assert found[what] == expected[what]


NEEDS_STRACE = pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed: run tools/setup.sh")


def unknown_to_the_kernel(calls: tuple[str, ...], trace: Path) -> list[str]:
    """The command that runs another one on a kernel without these system calls, its children too."""
    return [*strace(",".join(calls), trace), "-f", "-e", f"inject={','.join(calls)}:error=ENOSYS"]


def strace(calls: str, trace: Path) -> list[str]:
    return [shutil.which("strace") or "strace", "-qq", "-o", str(trace), "-e", f"trace={calls}"]


@NEEDS_STRACE
@pytest.mark.parametrize("calls", OLD_KERNELS.values(), ids=OLD_KERNELS)
def test_an_old_kernel(dgx: SimNode, start: Start, tmp_path: Path, calls: tuple[str, ...]) -> None:
    """System calls that the kernel does not know, in the real hook; its /proc/driver comes from an untouched one."""
    trace = tmp_path / "trace"
    hooks = [kernel_hook(dgx.path), nvct_hook(dgx.path, under=unknown_to_the_kernel(calls, trace))]
    with start(dgx, ENV, hooks=hooks) as container:
        assert seen(container, dgx) == wanted(dgx, DEVICES, CAPABILITIES)
    assert "ENOSYS" in trace.read_text()
    assert "(INJECTED)" in trace.read_text()


HOSTILE = "import os; os.open({mark!r}, os.O_CREAT | os.O_WRONLY)\n"
HOSTILE_C = '__attribute__((constructor)) static void run(void) {{ creat("{mark}", 0600); }}'


def set_traps(folder: Path, mark: Path) -> Path:
    """Modules under names that the hook or Python itself imports, and a library: whichever runs makes `mark`."""
    folder.mkdir()
    for name in ("json", "os", "re", "_json", "nvct", "sitecustomize", "usercustomize", "startup"):
        (folder / f"{name}.py").write_text(HOSTILE.format(mark=str(mark)))
    library = folder / "evil.so"
    source = HOSTILE_C.format(mark=mark)
    build = ["cc", "-w", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-"]
    subprocess.run(build, input=source, text=True, check=True)
    for command, name, value in (
        (["true"], "LD_PRELOAD", library),
        ([PYTHON, "-c", "import re"], "PYTHONPATH", folder),
    ):
        subprocess.run(command, env={"PATH": os.environ["PATH"], name: str(value)}, check=True)
        assert mark.exists(), "the trap does not work"
        mark.unlink()
    return library


@pytest.mark.parametrize("inventory", ["fresh", "none"])
def test_a_hostile_environment_changes_nothing(dgx: SimNode, start: Start, tmp_path: Path, inventory: str) -> None:
    """Python's variables and the current folder of the hook, and all of the image's environment, by which a container
    could try to have its own code run.
    """
    mark, evil = tmp_path / "mark", tmp_path / "evil"
    library = set_traps(evil, mark)
    python = {
        "PYTHONPATH": str(evil),
        "PYTHONHOME": str(evil),
        "PYTHONSTARTUP": str(evil / "startup.py"),
        "PYTHONINSPECT": "1",
        "PYTHONUSERBASE": str(evil),
    }
    asks_for_more = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"}
    loader = {"LD_PRELOAD": str(library), "LD_AUDIT": str(library), "LD_LIBRARY_PATH": str(evil)}
    own = [f"{name}={value}" for name, value in {**python, **asks_for_more}.items()]
    hook = nvct_hook(dgx.path, under=["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(evil)], env=own)
    with start(dgx, ENV):  # an inventory is there now
        pass
    if inventory == "none":
        dgx.forget()  # the slow way has child processes that could be led astray
    with start(dgx, {**python, **loader, **ENV}, hooks=[kernel_hook(dgx.path), hook]) as container:
        found = seen(container, dgx)
        expected = wanted(dgx, DEVICES, CAPABILITIES)
        assert (found["nodes"], found["mounts"]) == (expected["nodes"], expected["mounts"])
    assert not mark.exists()


WATCH = """\
import sys
sys.path.insert(0, {tree!r})
from nvct.oci import give, hook
report = open({report!r}, "w")
original = give.inject
def watched(*arguments):
    before = set(sys.modules)
    try:
        return original(*arguments)
    finally:
        report.write(repr((len(before), sorted(set(sys.modules) ^ before), sorted(sys.modules))))
        report.flush()
give.inject = watched
sys.exit(hook.main(["--config", {config!r}, "prestart"]))
"""

# What makes a hook slow to start (design, speed rule 1, and the modules that bring those).
SLOW = {"click", "yaml", "pynvml", "pyroute2", "psutil", "dataclasses", "typing", "pathlib", "subprocess", "logging"}
SLOW |= {"argparse", "re", "json", "ctypes", "struct", "functools", "collections", "contextlib", "enum", "tempfile"}
SLOW |= {"shutil"}


@NEEDS_STRACE
@pytest.mark.parametrize("kernel", MISSING_CALLS)
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_nothing_is_imported_in_the_container(
    dgx: SimNode, start: Start, static_programs: Path, tmp_path: Path, kernel: str, fails: bool
) -> None:
    """In the container's mount namespace every path of Python is the image's."""
    report, script = tmp_path / "report", tmp_path / "watch.py"
    script.write_text(WATCH.format(tree=str(TREE), report=str(report), config=str(dgx.config)))
    rootfs = tmp_path / "rootfs"
    make_root(rootfs, "debian", True, static_programs)
    if fails:
        (rootfs / FOLDERS["debian"][0][1:] / "libcuda.so").mkdir()
    command = [PYTHON, "-I", "-S", str(script)]
    if MISSING_CALLS[kernel]:
        command = [*unknown_to_the_kernel(MISSING_CALLS[kernel], tmp_path / "trace"), *command]
    with start(dgx, ENV):  # the inventory is fresh now
        pass
    hooks = [kernel_hook(dgx.path), {"path": command[0], "args": command}]
    try:
        with start(dgx, ENV, rootfs=rootfs, hooks=hooks):
            assert not fails
    except StartFailed as failure:
        assert fails
        assert "libcuda.so is to be a link, but the container has a folder" in str(failure)
    count, changed, modules = literal_eval(report.read_text())
    assert count > 20
    assert changed == []
    assert SLOW.isdisjoint(modules)


def test_the_state_may_name_the_root(dgx: SimNode, start: Start, tmp_path: Path) -> None:
    """crun adds `root` to the state; config.json's root.path may then be relative to a folder that is elsewhere."""
    program = (
        "import json, os, subprocess, sys; state = json.load(sys.stdin);"
        "spec = json.load(open(state['bundle'] + '/config.json')); state['root'] = spec['root']['path'];"
        f"sys.exit(subprocess.run([{str(HOOK)!r}, '--config', {str(dgx.config)!r}, 'prestart'],"
        " input=json.dumps(state).encode()).returncode)"
    )
    hooks = [kernel_hook(dgx.path), {"path": PYTHON, "args": [PYTHON, "-c", program]}]
    with start(dgx, ENV, hooks=hooks) as container:
        assert seen(container, dgx) == wanted(dgx, DEVICES, CAPABILITIES)
        assert json.loads((container.bundle / "config.json").read_text())["root"]["path"].startswith("/")
