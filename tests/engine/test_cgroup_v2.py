"""Device programs in real cgroups v2, and in a real runc container on v2.

Each test runs in a child process with a mount namespace of its own, where cgroup2 is mounted on /sys/fs/cgroup.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import shutil
import signal
import stat
import subprocess
import time
import traceback
from pathlib import Path

import pytest

from nvct.errors import InjectionError
from nvct.inject import bpf, syscalls
from nvct.inject.cgroup import DeviceCgroup
from nvct.inject.device_program import instruction, split

NULL, ZERO, GPU = (1, 3), (1, 5), (195, 0)
ROOT = Path("/sys/fs/cgroup")
NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="device programs are changed by root only"),
    pytest.mark.skipif("cgroup2" not in Path("/proc/filesystems").read_text(), reason="this kernel has no cgroup v2"),
]


def in_child(body, *arguments):
    """Run `body` in a child process; its failure is this one's."""
    told, telling = os.pipe()
    child = os.fork()
    if not child:
        try:
            body(*arguments)
        except BaseException:
            os.write(telling, traceback.format_exc().encode()[-60000:])
        os._exit(0)
    os.close(telling)
    with os.fdopen(told) as pipe:
        failure = pipe.read()
    os.waitpid(child, 0)
    if failure:
        pytest.fail(failure, pytrace=False)


def unshare(namespaces: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(namespaces):
        raise OSError(ctypes.get_errno(), "unshare")


def on_v2(test):
    """Run the test in a child whose /sys/fs/cgroup is a cgroup2."""

    def enter_and_run(arguments):
        unshare(NEW_MOUNTS)
        syscalls.mount("", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE, "", "/")
        syscalls.mount("none", str(ROOT), "cgroup2", 0, "", str(ROOT))
        test(**arguments)

    @functools.wraps(test)
    def run(**arguments):
        in_child(enter_and_run, arguments)

    return run


class Cgroup:
    """A cgroup with a sleeping process in it. A context manager: it is removed at the end."""

    def __init__(self, name: str) -> None:
        self.folder = ROOT / f"nvct-test-{os.getpid()}-{name}"

    def __enter__(self) -> Cgroup:
        self.folder.mkdir()
        self.descriptor = os.open(self.folder, os.O_RDONLY)
        self.pid = os.fork()
        if not self.pid:
            signal.pause()
        (self.folder / "cgroup.procs").write_text(str(self.pid))
        self.rules = DeviceCgroup.of(self.pid)
        return self

    def __exit__(self, *_):
        self.rules.close()
        os.close(self.descriptor)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        remove(self.folder)

    def attach(self, program: bytes, flags: int = bpf.F_ALLOW_MULTI, gpl: bool = False) -> None:
        loaded = bpf.load(program, gpl)
        bpf.attach(self.descriptor, loaded, flags)
        os.close(loaded)

    def programs(self) -> list[tuple[bytes, bool]]:
        found = []
        for number in bpf.attached(self.descriptor)[1]:
            program = bpf.program(number)
            found.append(bpf.instructions(program))
            os.close(program)
        return found

    def ids(self) -> list[int]:
        return bpf.attached(self.descriptor)[1]

    def error(self, number: tuple[int, int], flags: int = os.O_RDWR) -> int:
        """The errno with which a process of the cgroup opens a node of this number; 0 when it can."""
        folder = Path(f"/dev/shm/nvct-test-{os.getpid()}")
        folder.mkdir()
        node = folder / "node"
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(*number))
        try:
            return self._in_cgroup(lambda: os.open(node, flags))
        finally:
            node.unlink()
            folder.rmdir()

    def error_of_making(self, number: tuple[int, int]) -> int:
        node = f"/dev/shm/nvct-test-{os.getpid()}-made"
        code = self._in_cgroup(lambda: os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(*number)))
        Path(node).unlink(missing_ok=True)
        return code

    def _in_cgroup(self, action) -> int:
        child = os.fork()
        if not child:
            code = 255
            try:
                (self.folder / "cgroup.procs").write_text("0")
                action()
                code = 0
            except OSError as error:
                code = error.errno or 255
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def remove(folder: Path) -> None:
    for _ in range(200):  # the kernel lets go of dead members a moment later
        try:
            return folder.rmdir()
        except OSError:
            time.sleep(0.01)
    return folder.rmdir()


def runc_like(*numbers: tuple[int, int]) -> bytes:
    """Yes to these devices, no to the rest; each rule tests type, access, major, minor, as runc's programs do."""
    code = [
        instruction(0x61, 2, 1, 0),
        instruction(0xBC, 3, 2),
        instruction(0x54, 2, constant=0xFFFF),
        instruction(0x74, 3, constant=16),
        instruction(0x61, 4, 1, 4),
        instruction(0x61, 5, 1, 8),
    ]
    for major, minor in numbers:
        code += [
            instruction(0x55, 2, offset=7, constant=2),
            instruction(0xBC, 1, 3),
            instruction(0x54, 1, constant=6),
            instruction(0x5D, 1, 3, offset=4),
            instruction(0x55, 4, offset=3, constant=major),
            instruction(0x55, 5, offset=2, constant=minor),
            instruction(0xB4, 0, constant=1),
            instruction(0x95),
        ]
    return b"".join([*code, instruction(0xB4, 0, constant=0), instruction(0x95)])


def systemd_like(major: int) -> bytes:
    """Yes to all devices of one major, no to the rest, with one way out at the end, as systemd's programs do."""
    code = [
        instruction(0x61, 2, 1, 0),
        instruction(0x54, 2, constant=0xFFFF),
        instruction(0x61, 4, 1, 4),
        instruction(0x55, 2, offset=2, constant=2),
        instruction(0x55, 4, offset=1, constant=major),
        instruction(0x05, offset=2),
        instruction(0xB7, 0, constant=0),
        instruction(0x05, offset=1),
        instruction(0xB7, 0, constant=1),
        instruction(0x95),
    ]
    return b"".join(code)


EPERM = errno.EPERM


@on_v2
def test_every_program_lets_the_devices_pass():
    with Cgroup("two") as cgroup:
        cgroup.attach(runc_like(ZERO))
        cgroup.attach(systemd_like(7), gpl=True)
        before, ids = cgroup.programs(), cgroup.ids()
        assert [cgroup.error(number) for number in (NULL, ZERO, GPU)] == [EPERM] * 3
        undo = cgroup.rules.allow([NULL, GPU])
        assert [cgroup.error(number) for number in (NULL, ZERO)] == [0, EPERM]
        assert cgroup.error(GPU) in (0, errno.ENXIO)
        assert cgroup.error_of_making(NULL) == EPERM
        assert [gpl for _, gpl in cgroup.programs()] == [False, True]
        assert [split(text) for text, _ in cgroup.programs()] == [(frozenset({NULL, GPU}), old) for old, _ in before]
        undo()
        assert (cgroup.programs(), cgroup.ids()) == (before, ids)
        assert [cgroup.error(number) for number in (NULL, ZERO, GPU)] == [EPERM] * 3


@on_v2
def test_twice_is_once_and_more_devices_extend():
    with Cgroup("twice") as cgroup:
        cgroup.attach(runc_like())
        cgroup.rules.allow([NULL])
        ids = cgroup.ids()
        cgroup.rules.allow([NULL, NULL])()
        assert cgroup.ids() == ids
        undo = cgroup.rules.allow([ZERO])
        assert [split(text) for text, _ in cgroup.programs()] == [(frozenset({NULL, ZERO}), runc_like())]
        assert [cgroup.error(number) for number in (NULL, ZERO, GPU)] == [0, 0, EPERM]
        undo()
        assert cgroup.ids() == ids


@on_v2
def test_without_a_program_nothing_is_attached():
    with Cgroup("none") as cgroup:
        cgroup.rules.allow([GPU])()
        assert cgroup.ids() == []
        assert cgroup.error(NULL) == 0


@pytest.mark.parametrize("flags", [0, bpf.F_ALLOW_OVERRIDE])
@on_v2
def test_a_cgroup_that_takes_one_program_only(flags):
    with Cgroup("single") as cgroup:
        cgroup.attach(runc_like(), flags)
        ids = cgroup.ids()
        undo = cgroup.rules.allow([NULL])
        assert bpf.attached(cgroup.descriptor)[0] == flags
        assert cgroup.error(NULL) == 0
        undo()
        assert cgroup.ids() == ids
        assert cgroup.error(NULL) == EPERM


def refuse_replacing(code: int):
    """An attach whose BPF_F_REPLACE fails with `code`."""
    attach = bpf.attach

    def refusing(cgroup, program, flags, replaced=0):
        if flags & bpf.F_REPLACE:
            raise OSError(code, "BPF_PROG_ATTACH: refused")
        attach(cgroup, program, flags, replaced)

    return refusing


@on_v2
def test_a_kernel_that_cannot_replace(monkeypatch):
    with Cgroup("steps") as cgroup:
        cgroup.attach(runc_like())
        cgroup.attach(systemd_like(7))
        ids = cgroup.ids()
        monkeypatch.setattr(bpf, "attach", refuse_replacing(errno.EINVAL))
        undo = cgroup.rules.allow([NULL])
        assert len(cgroup.ids()) == 2
        assert cgroup.error(NULL) == 0
        undo()
        assert sorted(cgroup.ids()) == sorted(ids)
        assert cgroup.error(NULL) == EPERM


@on_v2
def test_a_failure_at_the_second_program_puts_the_first_back(monkeypatch):
    with Cgroup("half") as cgroup:
        cgroup.attach(runc_like())
        cgroup.attach(systemd_like(7))
        ids, attach, calls = cgroup.ids(), bpf.attach, []

        def fail_second(*arguments):
            calls.append(arguments)
            if len(calls) == 2:
                raise OSError(errno.ENOMEM, "BPF_PROG_ATTACH: no memory")
            attach(*arguments)

        monkeypatch.setattr(bpf, "attach", fail_second)
        with pytest.raises(InjectionError, match=rf"device programs of {cgroup.folder}: .*no memory \(ENOMEM\)"):
            cgroup.rules.allow([NULL])
        assert len(calls) == 3
        assert cgroup.ids() == ids


@on_v2
def test_programs_that_change_meanwhile_are_read_again(monkeypatch):
    with Cgroup("race") as cgroup:
        cgroup.attach(runc_like())
        load = bpf.load

        def change_first(text, gpl):
            monkeypatch.setattr(bpf, "load", load)
            bpf.detach(cgroup.descriptor, bpf.program(cgroup.ids()[0]))
            cgroup.attach(systemd_like(7))
            return load(text, gpl)

        monkeypatch.setattr(bpf, "load", change_first)
        cgroup.rules.allow([NULL])
        assert [split(text) for text, _ in cgroup.programs()] == [(frozenset({NULL}), systemd_like(7))]


@on_v2
def test_a_program_that_never_can_be_replaced_is_refused(monkeypatch):
    with Cgroup("link") as cgroup:
        cgroup.attach(runc_like())
        ids = cgroup.ids()
        monkeypatch.setattr(bpf, "attach", refuse_replacing(errno.ENOENT))
        with pytest.raises(InjectionError, match="BPF link"):
            cgroup.rules.allow([NULL])
        assert cgroup.ids() == ids


@on_v2
def test_a_program_that_calls_a_helper_is_refused():
    with Cgroup("helper") as cgroup:
        get_current_uid_gid = 15
        program = [instruction(0x85, constant=get_current_uid_gid), instruction(0xB7, 0, constant=0), instruction(0x95)]
        cgroup.attach(b"".join(program))
        ids = cgroup.ids()
        with pytest.raises(InjectionError, match=rf"device program {ids[0]} of {cgroup.folder}: it calls functions"):
            cgroup.rules.allow([NULL])
        assert cgroup.ids() == ids


@on_v2
def test_the_verifier_is_quoted():
    with pytest.raises(OSError, match=r"Permission denied; the verifier says: .*R0 !read_ok"):
        bpf.load(instruction(0x95), False)


@on_v2
def test_a_rootless_engine_is_told_so():
    with Cgroup("rootless") as cgroup:
        cgroup.attach(runc_like())

        def ask_in_user_namespace():
            unshare(NEW_USER)
            for name, text in (("setgroups", "deny"), ("uid_map", "0 0 1"), ("gid_map", "0 0 1")):
                Path(f"/proc/self/{name}").write_text(text)
            with pytest.raises(InjectionError, match=r"BPF_PROG_QUERY.*\(EPERM\); a rootless engine.*cgroups: false"):
                DeviceCgroup.of(cgroup.pid).allow([NULL])

        in_child(ask_in_user_namespace)


SCRIPT = "for index in 0 1 2; do (: < /dev/nvidia$index); done"


def bundle(folder: Path, cgroup: str) -> None:
    """A container of one busybox that opens three nodes which it has and to which runc gives no leave."""
    root = folder / "rootfs"
    for name in ("bin", "proc", "dev"):
        (root / name).mkdir(parents=True)
    shutil.copy("/usr/bin/busybox", root / "bin/busybox")
    (root / "bin/sh").symlink_to("busybox")
    subprocess.run(["runc", "spec", "--bundle", str(folder)], check=True)
    spec = json.loads((folder / "config.json").read_text())
    spec["process"].update(terminal=False, args=["/bin/sh", "-c", SCRIPT], rlimits=[])
    spec["linux"]["cgroupsPath"] = cgroup
    spec["linux"]["devices"] = [
        {"path": f"/dev/nvidia{minor}", "type": "c", "major": 195, "minor": minor, "fileMode": 0o666}
        for minor in range(3)
    ]
    (folder / "config.json").write_text(json.dumps(spec))


@pytest.mark.skipif(not shutil.which("runc") or not Path("/usr/bin/busybox").exists(), reason="runc or busybox missing")
@on_v2
def test_a_container_of_runc(tmp_path):
    name = f"nvct-test-{os.getpid()}-runc"
    bundle(tmp_path, f"/{name}")
    runc = ["runc", "--root", str(tmp_path / "state")]
    output = tmp_path / "output"
    with output.open("w") as file:
        subprocess.run([*runc, "create", "--bundle", str(tmp_path), name], check=True, stdout=file, stderr=file)
    try:
        state = json.loads(subprocess.run([*runc, "state", name], check=True, capture_output=True).stdout)
        rules = DeviceCgroup.of(state["pid"])
        assert rules.path == f"/sys/fs/cgroup/{name}"
        rules.allow([(195, 1)])
        subprocess.run([*runc, "start", name], check=True)
        for _ in range(200):
            if b"stopped" in subprocess.run([*runc, "state", name], check=True, capture_output=True).stdout:
                break
            time.sleep(0.02)
        refused = [line for line in output.read_text().split("\n") if "Operation not permitted" in line]
        assert [line.split("/dev/")[1][:7] for line in refused] == ["nvidia0", "nvidia2"]
    finally:
        subprocess.run([*runc, "delete", "--force", name], check=True)
        if (ROOT / name).exists():
            remove(ROOT / name)
