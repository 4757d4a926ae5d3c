"""A program of its own: calls nvct's hook over and over, each time with one system call failing, and judges each
trial.

    unshare -m --propagation private python -m tests.support.faults < ORDER

ORDER and the answer on standard output are JSON: see `Order` and `Report`. The hook runs in a child of this process, in
which everything that it imports is there already; strace attaches to it and only then it begins. So the start and the
end of the interpreter are never hit, and calls are counted from the hook's first one on, however many its start made.
The container is a mount namespace with a root folder, and a device cgroup of its own. A trial that leaves it as it was
leaves it to the next one.

Only one call fails in a trial, so undoing what was done never meets a second failure.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from nvct import ldcache, ldmerge
from nvct.inject import bpf
from nvct.inject.device_program import EXIT, SET, instruction
from nvct.node.cache import cache_path
from nvct.oci import give, hook  # noqa: F401  # `give` is imported by the hook when it is needed: here it must not be
from tests.support.bare import MISSING_CALLS, BareContainer, forget_calls
from tests.support.runc import TREE
from tests.support.trees import read_tree

ERRORS = ("EPERM", "ENOSPC", "EROFS", "ENOMEM", "EBUSY", "ENOSYS")

# Those of the C library's memory and of the interpreter's threads: how often they are called is a matter of what the
# process did before, so that a number need not be reached.
UNSTEADY = ("mmap", "munmap", "mremap", "madvise", "futex", "sched_yield")

# The kernel never lets these fail, and the C library believes it: a failing brk crashes every program.
INFALLIBLE = ("brk", "umask", "uname", "getpid", "geteuid", "getegid", "setfsuid", "setfsgid")

# The marker that the hook waits for, and the call that ends it: neither is the hook's.
_OUTSIDE = ("rt_sigtimedwait", "exit_group")

_LIMIT_S = 20
_CALL = re.compile(r"^(?:\[pid +\d+\] )?([a-z_0-9]+)\((.*)")


class Fault(NamedTuple):
    """The `number`th call of `call`, counted from the hook's first one on, fails with `error`, and all others work."""

    call: str
    number: int
    error: str

    def __str__(self) -> str:
        return f"{self.call} #{self.number} {self.error}"


class Order(NamedTuple):
    """`node`: its folder. `folder`: an empty one to work in. `env`: what the container asks for. `version`: of device
    cgroups, "v1" or "v2". `kernel`: one of bare.MISSING_CALLS. `sample`: how many faults of each call are tried, 0 for
    all; `seed` chooses them. `limit_s`: how long that may take. `share` (index, number): which part of these a process
    tries.
    """

    node: str
    folder: str
    env: dict[str, str]
    version: str
    kernel: str
    sample: int
    seed: int
    limit_s: float
    share: tuple[int, int] = (0, 1)


class Report(NamedTuple):
    """`calls`: how often the hook makes each. `outcomes` counts trials: "undone", "complete", "with a warning", "not
    reached". `wrong`: a line for each trial in which neither everything nor nothing was done.
    """

    calls: dict[str, int]
    outcomes: dict[str, int]
    wrong: list[str]


class Trial(NamedTuple):
    """How one call of the hook ended: its exit status, what it said, and the lines of strace."""

    status: int
    said: str
    trace: list[str]

    @property
    def failed_call(self) -> str:
        return next((line for line in self.trace if "(INJECTED)" in line), "")


# What a container looks like: a heading and a value for each thing that there is.
Picture = Mapping[str, object]


class Bench:
    """A container, as often as it is used up, and hooks called in it."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._folder = Path(order.folder)
        # Of its own, for an inventory of its own: what another process discovers must not change what happens here.
        self.config = f"{order.folder}/config.yaml"
        shutil.copy(f"{order.node}/config.yaml", self.config)
        self._made = 0
        self._container: BareContainer | None = None
        self._cgroup: CgroupV1 | CgroupV2 | None = None

    def renew(self) -> None:
        self.close()
        self._made += 1
        bundle = self._folder / str(self._made)
        rootfs = bundle / "rootfs"
        make_image(rootfs)
        spec = {
            "ociVersion": "1.0.2",
            "root": {"path": str(rootfs)},
            "process": {"env": [f"{k}={v}" for k, v in self._order.env.items()]},
        }
        (bundle / "config.json").write_text(json.dumps(spec))
        self._container = BareContainer(rootfs, Path(self._order.node, "proc/driver"))
        self._cgroup = (CgroupV1 if self._order.version == "v1" else CgroupV2)(self._container.pid)
        state = {"ociVersion": "1.0.2", "id": "faults", "pid": self._container.pid, "bundle": str(bundle)}
        (self._folder / "state").write_text(json.dumps(state))

    def close(self) -> None:
        if self._container:
            self._container.__exit__()
            shutil.rmtree(self._container.rootfs.parent)
            self._container = None
        if self._cgroup:
            self._cgroup.remove()
            self._cgroup = None

    def left_behind(self) -> list[str]:
        """What writers of the inventory should have removed."""
        kept = Path(cache_path(self.config))
        return [str(path) for path in kept.parent.glob(f".{kept.name}.*")]

    def picture(self) -> Picture:
        assert self._container
        assert self._cgroup
        found: dict[str, Any] = {f"path {path}": entry for path, entry in self._container.tree().items()}
        mask = self._container.root / "proc/driver/nvidia"
        found |= {f"path /proc/driver/nvidia{path}": entry for path, entry in read_tree(mask).items()}
        for line in self._own_mounts(f"/proc/{self._container.pid}/mountinfo"):
            fields = line.replace(str(self._container.rootfs), "").split(" ")
            heading = f"mount {fields[4]}"
            kind, _source, options = fields[fields.index("-") + 1 :]  # a tmpfs may be called so, or "none"
            found[heading] = (*found.get(heading, ()), fields[3], *fields[5 : fields.index("-")], kind, options)
        found["device rules"] = self._cgroup.rules()
        found["host's mounts"] = self._own_mounts("/proc/self/mountinfo")
        return found

    def _own_mounts(self, mountinfo: str) -> list[str]:
        """Those of our folders, at either end. The others, copied from the host with the namespace, go when somebody
        there removes their mount points.
        """
        own = (self._order.node, self._order.folder)
        return [line for line in Path(mountinfo).read_text().splitlines() if any(folder in line for folder in own)]

    def call(self, *inject: str) -> Trial:
        """Call the hook under strace with these options."""
        trace, said = self._folder / "trace", self._folder / "said"
        child = self._start_hook(said)
        command = ["strace", "-o", str(trace), "-s", "64", *inject, "-p", str(child)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr
            for line in strace.stderr:
                if line.rstrip().endswith("attached"):
                    break
            os.kill(child, signal.SIGUSR1)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Trial(status, said.read_text(), trace.read_text().splitlines())

    def _start_hook(self, said: Path) -> int:
        """A child that waits for SIGUSR1 and is the hook from then on."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        ready, readying = os.pipe()
        child = os.fork()
        if child:
            os.close(readying)
            os.read(ready, 1)  # from here on it makes no call of its own
            os.close(ready)
            return child
        status = 99
        try:
            os.dup2(os.open(self._folder / "state", os.O_RDONLY), 0)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            forget_calls(MISSING_CALLS[self._order.kernel])
            arguments = ["--config", self.config, "prestart"]
            signal.alarm(_LIMIT_S)
            os.write(readying, b"!")
            signal.sigwait([signal.SIGUSR1])
            status = hook.main(arguments)
        finally:
            os._exit(status)


def make_image(rootfs: Path) -> None:
    """A root folder in which every kind of edit has something to remove, to replace, or to make."""
    libraries = f"usr/lib/{os.uname().machine}-linux-gnu"
    for name in ("etc", "usr/bin", libraries, "usr/lib/firmware/nvidia/470.9", "run"):
        (rootfs / name).mkdir(parents=True)
    (rootfs / "lib").symlink_to("usr/lib")
    (rootfs / "etc/debian_version").write_text("12.0\n")
    leftovers = (f"{libraries}/libnvidia-ml.so.470.9", "lib/firmware/nvidia/470.9/gsp.bin")
    for number, name in enumerate(leftovers):
        (rootfs / name).touch()
        (rootfs / name).chmod((0o666, 0o600)[number])
        os.chown(rootfs / name, 7, 8)
    (rootfs / "lib/firmware/nvidia/470.9").chmod(0o777)
    (rootfs / libraries / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.470.9")
    (rootfs / libraries / "libnvidia-cfg.so.1").symlink_to("elsewhere")
    (rootfs / libraries / "libnvidia-cfg.so").write_text("a file of the image")
    (rootfs / "usr/bin/nvidia-smi").symlink_to("nowhere")
    cache = rootfs / "etc/ld.so.cache"
    flags = ldcache.flags_for(os.uname().machine, 64)
    cache.write_bytes(ldmerge.merge(None, [("libc.so.6", f"/{libraries}/libc.so.6", flags)], lambda name, path: False))
    cache.chmod(0o640)
    os.chown(cache, 5, 6)


class CgroupV1:
    """A device cgroup that lets nothing but nodes be made, with one process in it."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/sys/fs/cgroup/devices/nvct-faults-{os.getpid()}-{pid}")
        self._folder.mkdir()
        for name, text in (("devices.deny", "a"), ("devices.allow", "c *:* m"), ("cgroup.procs", str(pid))):
            (self._folder / name).write_text(text)

    def rules(self) -> str:
        return (self._folder / "devices.list").read_text()

    def remove(self) -> None:
        remove_cgroup(self._folder)


class CgroupV2:
    """The same with two device programs, each of which must allow a device."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/sys/fs/cgroup/nvct-faults-{os.getpid()}-{pid}")
        self._folder.mkdir()
        self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        for number in (1, 2):
            deny = instruction(SET, 3, constant=number) + instruction(SET, 0, constant=0) + instruction(EXIT)
            program = bpf.load(deny, False)
            bpf.attach(self._descriptor, program, bpf.F_ALLOW_MULTI)
            os.close(program)
        (self._folder / "cgroup.procs").write_text(str(pid))

    def rules(self) -> list[str]:
        found = []
        for number in bpf.attached(self._descriptor)[1]:
            program = bpf.program(number)
            found.append(bpf.instructions(program)[0].hex())
            os.close(program)
        return found

    def remove(self) -> None:
        os.close(self._descriptor)
        remove_cgroup(self._folder)


def remove_cgroup(folder: Path) -> None:
    for _ in range(500):  # the kernel lets go of dead members a moment later
        try:
            return folder.rmdir()
        except OSError:
            time.sleep(0.005)
    return folder.rmdir()


class Sweep:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._bench = Bench(order)
        self._outcomes: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._before: Picture = {}
        self._after: Picture = {}

    def run(self) -> Report:
        try:
            self._bench.renew()
            self._bench.call("-e", "trace=none")  # the first one discovers the node; all others find it known
            self._bench.renew()
            self._before = self._bench.picture()
            calls = self._calls()
            self._after = self._bench.picture()
            self._renew()
            node = read_tree(Path(self._order.node))
            index, number = self._order.share
            deadline = time.monotonic() + self._order.limit_s
            for fault in self._chosen(calls)[index::number]:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{self._order.limit_s} s were too short: {dict(self._outcomes)}")
                self._try(fault)
            self._wrong += differences(node, read_tree(Path(self._order.node)))
            self._wrong += self._bench.left_behind()
        finally:
            self._bench.close()
            Path(cache_path(self._bench.config)).unlink(missing_ok=True)
        return Report(calls, dict(self._outcomes), self._wrong)

    def _renew(self) -> None:
        self._bench.renew()
        unlike = differences(self._before, self._bench.picture())
        if unlike:
            raise AssertionError(f"a new container is not as the last one was: {unlike}")

    def _calls(self) -> dict[str, int]:
        """How often the hook makes each call when nothing fails."""
        trial = self._bench.call("-e", "trace=all")
        if trial.status or trial.said:
            raise AssertionError(f"the hook fails without a fault: {trial.status} {trial.said}")
        found = (match.group(1) for line in trial.trace if (match := _CALL.match(line)))
        return dict(
            Counter(name for name in found if name not in INFALLIBLE + _OUTSIDE and not name.startswith("syscall_"))
        )

    def _chosen(self, calls: dict[str, int]) -> list[Fault]:
        chance = random.Random(self._order.seed)
        chosen = []
        for call, times in sorted(calls.items()):
            every = [Fault(call, number, error) for number in range(1, times + 1) for error in ERRORS]
            size = min(self._order.sample or len(every), len(every))
            chosen += sorted(chance.sample(every, size))
        return chosen

    def _try(self, fault: Fault) -> None:
        trial = self._bench.call(
            "-e", f"trace={fault.call}", "-e", f"inject={fault.call}:error={fault.error}:when={fault.number}"
        )
        now = self._bench.picture()
        outcome, faults = self._judged(fault, trial, now)
        self._outcomes[outcome] += 1
        if faults:
            self._wrong.append(
                f"{fault}: {trial.failed_call or 'not reached'}: {'; '.join(faults)}; said {trial.said!r}"
            )
        if now != self._before:
            self._renew()

    def _judged(self, fault: Fault, trial: Trial, now: Picture) -> tuple[str, list[str]]:
        """The outcome, and what is wrong about it."""
        if not trial.failed_call and fault.call not in UNSTEADY:
            return "not reached", ["the call was not made that often"]
        if trial.status == 1:
            return "undone", differences(self._before, now) + complaints(trial)
        if trial.status == 0:
            outcome = "not reached" if not trial.failed_call else "with a warning" if trial.said else "complete"
            return outcome, self._lacks(fault, trial.said, now)
        return "crashed", [f"exit status {trial.status}"]

    def _lacks(self, fault: Fault, said: str, now: Picture) -> list[str]:
        """What is not as in a container where nothing failed, with no warning about it."""
        if (fault.call, fault.error) == ("fchown", "EPERM"):
            return []  # as a user namespace says that a file's owner cannot be kept
        excused = {heading for heading in self._after.keys() - now.keys() if is_named(heading, said)}
        if fault.error in (
            "EBUSY",
            "EROFS",
        ):  # what an earlier driver left may lie on a volume of the user's, and stays
            leftovers = self._before.keys() - self._after.keys()
            excused |= {heading for heading in leftovers if now.get(heading) == self._before[heading]}
        return differences(self._after, now, excused)


def complaints(trial: Trial) -> list[str]:
    """What is wrong with what the hook said about its failure."""
    if trial.failed_call.startswith("write(2,"):  # it could say nothing
        return []
    if not re.fullmatch(r"nvct: [^\n]{20,}\n", trial.said):
        return ["no error in one line"]
    if "a fault of nvct" in trial.said or "NOT undone" in trial.said:
        return ["not the message of a failure that was foreseen"]
    return []


def is_named(heading: str, said: str) -> bool:
    """Whether warnings name the path, by whichever way the host or the container gets there; or one in that folder."""
    kind, path = heading.split(" ", 1)
    named = re.findall(r"/[^\s:,;']+", said)
    folders = {part for name in named for part in name.split("/")[:-1]} if kind == "path" else set()
    return os.path.basename(path) in folders | {os.path.basename(name) for name in named}


def differences(wanted: Picture, found: Picture, but: Collection[str] = ()) -> list[str]:
    """A line for each thing that is not the same."""
    return [
        f"{heading}: {found.get(heading, 'absent')} instead of {wanted.get(heading, 'absent')}"
        for heading in sorted((wanted.keys() | found.keys()) - set(but))
        if wanted.get(heading) != found.get(heading)
    ]


def main() -> None:
    order = Order(*json.load(sys.stdin))
    json.dump(Sweep(order).run(), sys.stdout)


def sweep(order: Order) -> Report:
    """Carry an order out, on every core, and add the reports up."""
    number = os.cpu_count() or 1
    orders = [order._replace(folder=f"{order.folder}/{index}", share=(index, number)) for index in range(number)]
    with ThreadPoolExecutor(number) as pool:
        reports = list(pool.map(_part, orders))
    outcomes = sum((Counter(report.outcomes) for report in reports), Counter())
    return Report(reports[0].calls, dict(outcomes), [line for report in reports for line in report.wrong])


def _part(order: Order) -> Report:
    """Run this program in a mount namespace of its own, on the version of device cgroups that the order names."""
    Path(order.folder).mkdir(parents=True)
    enter = 'mount -t cgroup2 none /sys/fs/cgroup; exec "$@"' if order.version == "v2" else 'exec "$@"'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-ec", enter, "sh", sys.executable]
    done = subprocess.run(
        [*command, "-m", __name__],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        cwd=TREE,
    )
    if done.returncode:
        raise AssertionError(f"the sweep ended with status {done.returncode}: {done.stderr}")
    report: Any = json.loads(done.stdout)
    return Report(*report)


if __name__ == "__main__":
    main()
