"""Device rules in a real cgroup v1 that the test makes below the devices controller."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import pytest

from nvct.errors import InjectionError
from nvct.inject.cgroup import DeviceCgroup

CONTROLLER = Path("/sys/fs/cgroup/devices")
NULL, ZERO, GPU = (1, 3), (1, 5), (195, 0)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="device cgroups are changed by root only"),
    pytest.mark.skipif(
        not (CONTROLLER / "devices.allow").exists(), reason="no cgroup v1 devices controller is mounted"
    ),
]


class Cgroup:
    """A cgroup that allows making nodes and nothing else, as runc's containers do, with a sleeping process in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.write("devices.deny", "a")
        self.write("devices.allow", "c *:* m")
        self.pid = os.fork()
        if not self.pid:
            signal.pause()
        self.write("cgroup.procs", str(self.pid))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def rules(self) -> str:
        return (self.folder / "devices.list").read_text()

    def error_of_open(self, path: object, flags: int = os.O_RDWR) -> int:
        """The errno with which a process of the cgroup opens `path`; 0 when it can."""
        child = os.fork()
        if not child:
            code = 255
            try:
                self.write("cgroup.procs", "0")
                os.open(str(path), flags)
                code = 0
            except OSError as error:
                code = error.errno or 255
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def remove(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for _ in range(100):  # the kernel lets go of dead members a moment later
            try:
                return self.folder.rmdir()
            except OSError:
                time.sleep(0.01)
        return self.folder.rmdir()


@pytest.fixture
def cgroup():
    made = Cgroup(CONTROLLER / f"nvct-test-{os.getpid()}")
    yield made
    made.remove()


@pytest.fixture
def rules_of(cgroup):
    opened = DeviceCgroup.of(cgroup.pid)
    yield opened
    opened.close()


@pytest.fixture
def gpu(tmp_path):
    node = tmp_path / "nvidia0"
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(*GPU))
    return node


EPERM, ENXIO = 1, 6


def test_devices_open_and_close_again(cgroup, rules_of, gpu):
    assert rules_of.path == str(cgroup.folder)
    before = cgroup.rules()
    assert [cgroup.error_of_open(path) for path in ("/dev/null", "/dev/zero", gpu)] == [EPERM] * 3
    undo = rules_of.allow([NULL, GPU])
    # Nothing drives the GPU's number (ENXIO) unless the machine has one: only EPERM is the cgroup's answer.
    assert [cgroup.error_of_open(path) for path in ("/dev/null", "/dev/zero", gpu)] in (
        [0, EPERM, ENXIO],
        [0, EPERM, 0],
    )
    assert cgroup.rules() == "c *:* m\nc 1:3 rw\nc 195:0 rw\n"
    undo()
    assert [cgroup.error_of_open(path) for path in ("/dev/null", "/dev/zero", gpu)] == [EPERM] * 3
    assert cgroup.rules() == before


def test_undo_leaves_what_was_allowed_before(cgroup, rules_of):
    cgroup.write("devices.allow", "c 1:3 r")
    cgroup.write("devices.allow", "c 1:5 rw")
    cgroup.write("devices.allow", "c 195:0 m")
    before = cgroup.rules()
    undo = rules_of.allow([NULL, ZERO, GPU])
    assert cgroup.rules() == "c *:* m\nc 1:3 rw\nc 1:5 rw\nc 195:0 rwm\n"
    undo()
    assert cgroup.rules() == before
    undo()
    assert cgroup.rules() == before


def test_twice_is_once_and_the_second_undo_takes_back_nothing(cgroup, rules_of):
    rules_of.allow([NULL])
    after = cgroup.rules()
    rules_of.allow([NULL, NULL])()
    assert cgroup.rules() == after


def test_a_cgroup_that_allows_everything_is_left_alone(cgroup, rules_of):
    cgroup.write("devices.allow", "a")
    undo = rules_of.allow([NULL, GPU])
    assert cgroup.rules() == "a *:* rwm\n"
    undo()
    assert cgroup.error_of_open("/dev/null") == 0


def test_what_the_parent_denies_fails_whole(cgroup):
    cgroup.write("devices.allow", "c 1:3 rw")
    inner = Cgroup(cgroup.folder / "inner")
    opened = DeviceCgroup.of(inner.pid)
    before = inner.rules()
    try:
        with pytest.raises(InjectionError, match=r"'c 195:0 rw' to devices.allow of .*/inner: .*\(EPERM\); .*parent"):
            opened.allow([NULL, GPU])
        assert inner.rules() == before
    finally:
        opened.close()
        inner.remove()


def test_a_long_list_is_read_whole(cgroup, rules_of):
    for minor in range(1000):
        cgroup.write("devices.allow", f"c 300:{minor} rw")
    before = cgroup.rules()
    rules_of.allow([(300, 0), (300, 999)])()
    assert cgroup.rules() == before


def test_an_ordinary_user_is_told_where_it_failed(cgroup):
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            DeviceCgroup.of(cgroup.pid)
        except InjectionError as error:
            code = 0 if f"{cgroup.folder}/devices.allow" in str(error) and "EACCES" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
