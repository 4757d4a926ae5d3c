"""Device cgroups without a kernel: the prologue of device programs, devices.list, and where a cgroup's folder is."""

from __future__ import annotations

import os
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvct.errors import InjectionError
from nvct.inject import bpf, cgroup
from nvct.inject.device_program import extended, instruction, obstacle, prologue, split

BLOCK, CHARACTER = 1, 2
MAKE, READ, WRITE = 1, 2, 4
MASK_64 = (1 << 64) - 1
UNKNOWN = object()


def answer(program: bytes, kind: int, access: int, major: int, minor: int) -> int:
    """What a device program answers. Reading a register before it is set, or running off the end, is an error."""
    question = {0: access << 16 | kind, 4: major, 8: minor}
    registers: list[object] = [UNKNOWN] * 10
    registers[1] = "question"
    at = 0
    while True:
        word = program[8 * at : 8 * at + 8]
        code, to, source = word[0], word[1] & 15, word[1] >> 4
        offset = int.from_bytes(word[2:4], "little", signed=True)
        constant = int.from_bytes(word[4:8], "little", signed=True)
        at += 1
        if code == 0x95:
            assert isinstance(registers[0], int)
            return registers[0]
        if code == 0x05:
            at += offset
        elif code == 0xB7:
            registers[to] = constant & MASK_64
        elif code == 0xBF:
            assert registers[source] is not UNKNOWN
            registers[to] = registers[source]
        elif code == 0x61:
            assert registers[source] == "question"
            registers[to] = question[offset]
        else:
            value = registers[to]
            assert isinstance(value, int)
            if code == 0x57:
                registers[to] = value & constant & MASK_64
            elif code == 0x77:
                registers[to] = value >> constant
            else:
                jumps = {
                    0x15: value == constant & MASK_64,
                    0x55: value != constant & MASK_64,
                    0x45: value & constant & MASK_64 != 0,
                }
                at += offset if jumps[code] else 0


def engine_program(rules: list[tuple[int, int, int, int]]) -> bytes:
    """A program as engines write it: yes to the rules (type, access, major, minor), no to the rest."""
    code = [
        instruction(0x61, 2, 1, 0),
        instruction(0xBF, 3, 2),
        instruction(0x57, 2, constant=0xFFFF),
        instruction(0x77, 3, constant=16),
        instruction(0x61, 4, 1, 4),
        instruction(0x61, 5, 1, 8),
    ]
    for kind, access, major, minor in rules:
        code += [
            instruction(0x55, 2, offset=5, constant=kind),
            instruction(0x45, 3, offset=4, constant=~access),
            instruction(0x55, 4, offset=3, constant=major),
            instruction(0x55, 5, offset=2, constant=minor),
            instruction(0xB7, 0, constant=1),
            instruction(0x95),
        ]
    return b"".join([*code, instruction(0xB7, 0, constant=0), instruction(0x95)])


majors = st.sampled_from([0, 1, 195, 234, 511, 4095])
minors = st.sampled_from([0, 1, 2, 254, 255, 256, (1 << 20) - 1])
numbers = st.lists(st.tuples(majors, minors), min_size=1, max_size=12)
engine_rules = st.lists(st.tuples(st.sampled_from([BLOCK, CHARACTER]), st.integers(0, 7), majors, minors), max_size=4)
questions = st.tuples(st.sampled_from([BLOCK, CHARACTER]), st.integers(0, 7), majors, minors)


@given(numbers, engine_rules, st.lists(questions, min_size=1, max_size=20))
def test_the_prologue_adds_reading_and_writing_and_nothing_else(allowed, rules, asked):
    old = engine_program(rules)
    new = extended(old, allowed)
    for kind, access, major, minor in [*asked, *((CHARACTER, READ | WRITE, *number) for number in allowed)]:
        ours = kind == CHARACTER and not access & MAKE and (major, minor) in allowed
        before = any((kind, major, minor) == (rule[0], *rule[2:]) and access & rule[1] == access for rule in rules)
        assert answer(old, kind, access, major, minor) == before
        assert answer(new, kind, access, major, minor) == (before or ours)


@given(numbers, engine_rules)
def test_twice_is_once(allowed, rules):
    once = extended(engine_program(rules), allowed)
    assert extended(once, reversed(allowed)) == once


@given(numbers, numbers, engine_rules)
def test_a_second_request_extends_the_prologue(first, second, rules):
    old = engine_program(rules)
    grown = extended(extended(old, first), second)
    assert grown == extended(old, first + second)
    assert split(grown) == (frozenset(first + second), old)


@given(st.binary(max_size=200))
def test_no_foreign_program_is_taken_for_ours(text):
    assert split(text) == (frozenset(), text)


def test_a_changed_prologue_is_a_program_like_any_other():
    ours = prologue([(195, 0), (195, 255)])
    for at in range(len(ours)):
        changed = ours[:at] + bytes((ours[at] ^ 1,)) + ours[at + 1 :]
        devices, rest = split(changed + engine_program([]))
        assert not devices or prologue(devices) + rest == changed + engine_program([])


def test_every_cut_of_a_prologue_is_a_program_like_any_other():
    ours = prologue([(195, 0), (195, 255)])
    for end in range(len(ours)):
        assert split(ours[:end]) == (frozenset(), ours[:end])


def test_many_devices_fit():
    many = [(195, minor) for minor in range(1000)]
    program = extended(engine_program([]), many)
    assert answer(program, CHARACTER, READ, 195, 999) == 1
    assert answer(program, CHARACTER, READ, 195, 1000) == 0


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (b"", "CAP_BPF"),
        (bytes(80), "net.core.bpf_jit_harden"),
        (instruction(0xBF, 11, 2) + instruction(0x95), "net.core.bpf_jit_harden"),
        (instruction(0xBF, 2, 11) + instruction(0x95), "net.core.bpf_jit_harden"),
        (instruction(0x85, constant=14) + instruction(0x95), "calls functions"),
        (instruction(0x18, 1, 1, constant=7) + bytes(8) + instruction(0x95), "maps"),
        (instruction(0x18, 1, 0, constant=7) + bytes(8) + instruction(0x95), ""),
        (engine_program([(CHARACTER, READ, 1, 3)]), ""),
    ],
)
def test_what_cannot_be_loaded_again_is_told_with_the_reason(program, expected):
    reason = obstacle(program)
    assert (expected in reason) if expected else (reason == "")


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        (["a *:* rwm"], True),
        (["c *:* m", "b *:* m"], False),
        (["c 195:0 rw"], True),
        (["c 195:0 rwm"], True),
        (["c 195:* rw"], True),
        (["c *:0 rw"], True),
        (["c 195:* r", "c 195:0 w"], False),
        (["c 195:1 rw", "c 19:0 rw", "b 195:0 rw"], False),
        ([], False),
    ],
)
def test_devices_list(rules, allowed):
    parsed = [line.replace(":", " ").split() for line in rules]
    assert cgroup.allows(parsed, 195, 0) is allowed


MOUNTINFO = r"""24 30 0:22 / /sys rw,nosuid - sysfs sysfs rw
31 24 0:27 / /sys/fs/cgroup/devices rw,relatime shared:9 - cgroup cgroup rw,devices
32 24 0:28 /docker/ab /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 24 0:29 / /run/my\040cgroup\134s rw,relatime shared:10 master:3 - cgroup2 cgroup2 rw,nsdelegate
"""


def test_cgroup_mounts():
    assert cgroup.cgroup_mounts(MOUNTINFO) == [
        cgroup.CgroupMount("/", "/sys/fs/cgroup/devices", ("rw", "devices")),
        cgroup.CgroupMount("/docker/ab", "/sys/fs/cgroup/cpu,cpuacct", ("rw", "cpu", "cpuacct")),
        cgroup.CgroupMount("/", "/run/my cgroup\\s", ("",)),
    ]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_any_mount_point_is_read_back(point):
    escaped = "".join(f"\\{ord(letter):03o}" if letter in " \t\n\\" else letter for letter in point)
    line = f"9 1 0:1 / {escaped} rw - cgroup x rw,devices\n"
    assert cgroup.cgroup_mounts(line) == [cgroup.CgroupMount("/", point, ("rw", "devices"))]


@pytest.mark.parametrize("line", ["36 - cgroup cgroup rw", " - cgroup2 x", "- cgroup", "9 1 0:1 / - cgroup x y"])
def test_what_is_no_line_of_mountinfo_is_passed_over(line):
    """Found by the fuzzer."""
    assert cgroup.cgroup_mounts(line) == []


def test_a_backslash_that_begins_no_code_stays():
    """Found by the fuzzer."""
    (mount,) = cgroup.cgroup_mounts("9 1 0:1 \\9x /a\\1\\ rw - cgroup x rw,devices")
    assert (mount.root, mount.point) == ("\\9x", "/a\\1\\")


@pytest.mark.parametrize(
    ("controller", "path"),
    [("devices", "/docker/a:b\u2028c"), ("cpuacct", "/x"), ("", "/user.slice"), ("pids", None), ("name=systemd", "/s")],
)
def test_cgroup_path(controller, path):
    text = "9:name=systemd:/s\n5:devices:/docker/a:b\u2028c\n4:cpu,cpuacct:/x\n0::/user.slice\n"
    assert cgroup.cgroup_path(text, controller) == path


@pytest.mark.parametrize(
    ("root", "path", "folder"),
    [
        ("/", "/docker/ab", "/m/docker/ab"),
        ("/", "/", "/m"),
        ("/docker/ab", "/docker/ab", "/m"),
        ("/docker/ab", "/docker/ab/docker/cd", "/m/docker/cd"),
        ("/docker/ab", "/docker/abc", None),
        ("/docker/ab", "/other", None),
        ("/..", "/../x", None),
        ("/", "/../x", None),
        ("/", "/..", None),
        ("/", "/..x", "/m/..x"),
    ],
)
def test_folder_below(root, path, folder):
    assert cgroup.folder_below(cgroup.CgroupMount(root, "/m", ("devices",)), path) == folder


def files(monkeypatch, texts):
    monkeypatch.setattr(cgroup, "_read", lambda path: texts[path])


def test_a_cgroup_outside_the_namespace_is_refused(monkeypatch):
    files(monkeypatch, {"/proc/7/cgroup": "5:devices:/../x\n", "/proc/self/mountinfo": MOUNTINFO})
    with pytest.raises(InjectionError, match=r"/\.\./x of process 7 is not seen here.*cgroup namespaces"):
        cgroup._folder_of(7, "devices")


def test_a_host_without_the_devices_controller_is_refused(monkeypatch):
    files(monkeypatch, {"/proc/7/cgroup": "0::/x\n", "/proc/self/mountinfo": MOUNTINFO})
    with pytest.raises(InjectionError, match="no line for controller 'devices'"):
        cgroup._folder_of(7, "devices")


def test_the_upper_mount_counts(monkeypatch):
    lines = "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 a rw\n2 1 0:1 /a /sys/fs/cgroup rw - cgroup2 a rw\n"
    files(monkeypatch, {"/proc/7/cgroup": "0::/a/b\n", "/proc/self/mountinfo": lines})
    assert cgroup._folder_of(7, "") == "/sys/fs/cgroup/b"


def test_a_process_that_is_gone():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(InjectionError, match=rf"/proc/{child}/cgroup.*ENOENT"):
        cgroup.DeviceCgroup.of(child)


@pytest.mark.parametrize("release", ["5.10.0-28-amd64", "4.19+", "5.4-rc1"])
def test_old_kernels_get_locked_memory(release, monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: limits.append((which, values)))
    bpf.raise_locked_memory(release)
    assert limits == [(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))]


@pytest.mark.parametrize("release", ["5.11.0", "6.1.0-18-amd64", "10.0"])
def test_new_kernels_need_no_locked_memory(release, monkeypatch):
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: pytest.fail("limit changed"))
    bpf.raise_locked_memory(release)


def test_locked_memory_is_raised_as_far_as_allowed(monkeypatch):
    limits = []

    def refuse_infinity(which, values):
        if resource.RLIM_INFINITY in values:
            raise ValueError("not allowed to raise maximum limit")
        limits.append(values)

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1, 65536))
    monkeypatch.setattr(resource, "setrlimit", refuse_infinity)
    bpf.raise_locked_memory("5.4.0")
    assert limits == [(65536, 65536)]
