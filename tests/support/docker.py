"""A real dockerd on a simulated node, with its own folder, socket and containerd, and images made on this machine.

dockerd looks for `nvidia-container-runtime-hook` in its PATH when it starts: the node's hooks folder stands first.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nvct.record import record
from nvct.sim import bundle as bundles
from tests.support.nodes import SimNode
from tests.support.runc import DENIED, OPEN_DEVICE

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = Path(__file__).resolve().parents[1] / "programs"

# A runtime of this name can start --privileged containers where root itself lacks a capability; see the program.
LESSER_RUNC = "lesser-runc"

_NEEDED = ("dockerd", "docker", "containerd", "runc", "busybox", "unshare", "setpriv")


class DockerError(Exception):
    """dockerd did not start, or refused a command; the text is what it said."""


def why_no_dockerd() -> str:
    """Why dockerd cannot run here, in one line; "" when it can."""
    if os.geteuid() != 0:
        return "dockerd needs root"
    absent = [name for name in _NEEDED if not shutil.which(name, path=PATH)]
    if absent:
        return f"not installed: {', '.join(absent)} (make setup)"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        return "this root may make no mount namespaces"
    if not os.access("/sys/fs/cgroup", os.W_OK):
        return "/sys/fs/cgroup is mounted read-only"
    return ""


@record
class Member:
    """What stands at one path of a container's file system. `kind` is "file", "folder", "link" or "other"."""

    kind: str
    size: int
    link: str


class Dockerd:
    """Use as a context manager. Everything is below `folder`, and gone from mounts and processes afterwards.

    `options` are more of dockerd's own; `prefix` is a command that runs it, such as one that enters a namespace.
    """

    def __init__(self, folder: Path, node: Path, options: Sequence[str] = (), prefix: Sequence[str] = ()) -> None:
        self._options = options
        self._prefix = prefix
        self.folder = folder
        self.node = node
        self.runtime = folder / LESSER_RUNC
        self._socket = f"unix://{folder}/docker.sock"
        self._images: set[str] = set()

    def __enter__(self) -> Dockerd:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.runtime.symlink_to(PROGRAMS / "lesser_runc.py")
        (self.folder / "daemon.json").write_text("{}")  # in place of the machine's own /etc/docker/daemon.json
        self._had_cgroups = set(_cgroups())
        self._start()
        return self

    def start_again(self) -> None:
        """End dockerd in order and start another one; with the option --live-restore containers run on meanwhile."""
        self._process.terminate()
        self._process.wait(30)
        self._start()

    def _start(self) -> None:
        command = [
            *("setpriv", "--pdeathsig", "TERM"),  # it ends in order when this process is killed
            *self._prefix,
            *("dockerd", "--config-file", f"{self.folder}/daemon.json", "--host", self._socket),
            *("--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec"),
            *("--pidfile", f"{self.folder}/pid", "--add-runtime", f"{LESSER_RUNC}={self.runtime}"),
            *("--bridge=none", "--iptables=false", "--ip-forward=false"),
            *self._options,
        ]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={"PATH": f"{self.node}/hooks:{PATH}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C goes to pytest alone, which then stops dockerd in order
            )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise

    def __exit__(self, *_: object) -> None:
        for container in self.docker("ps", "--all", "--quiet").split():
            self.docker("rm", "--force", container)
        self._stop()

    def _wait(self) -> None:
        deadline = time.monotonic() + 30
        while self._run("version").returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = (self.folder / "log").read_text(errors="replace").strip().rpartition("\n")[2]
                raise DockerError(f"dockerd did not start: {last}")
            time.sleep(0.05)

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # One that stopped with containers left behind has not unmounted its folder.
        while f" {self.folder}/data " in Path("/proc/self/mountinfo").read_text():
            subprocess.run(["umount", f"{self.folder}/data"], check=True)
        for folder in set(_cgroups()) - self._had_cgroups:
            with suppress(OSError):  # another dockerd has begun to use it
                folder.rmdir()

    def _run(self, *arguments: str, text: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        env = {"PATH": PATH, "DOCKER_HOST": self._socket, "DOCKER_CONFIG": f"{self.folder}/client"}
        return subprocess.run(["docker", *arguments], env=env, input=text, capture_output=True)

    def docker(self, *arguments: str, text: bytes | None = None) -> str:
        """What the docker command prints, without blanks around it. Raises DockerError with what it says instead."""
        done = self._run(*arguments, text=text)
        if done.returncode:
            raise DockerError((done.stdout + done.stderr).decode())  # what an `exec` could not do is on stdout
        return done.stdout.decode().strip()

    def image(self, family: str, env: Mapping[str, str] | None = None) -> str:
        """The name of an image with the root file system of a family of nvct.sim.bundle, and variables of its own."""
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        name = f"nvct-{family}-{uuid.uuid5(uuid.NAMESPACE_OID, repr(variables)).hex[:8]}"
        if name not in self._images:
            root = self.folder / name
            bundles.make_rootfs(root, family)
            changes = [word for variable in ("PATH=/usr/bin", *variables) for word in ("--change", f"ENV {variable}")]
            self.docker("import", *changes, "-", name, text=_tar(root))
            self._images.add(name)
        return name

    @contextmanager
    def container(
        self, image: str, *options: str, command: Sequence[str] = ("sleep", "600")
    ) -> Iterator[DockerContainer]:
        """A container that runs, removed afterwards. Raises DockerError where docker cannot start it."""
        name = f"nvct-{uuid.uuid4().hex[:12]}"
        try:
            self.docker("run", "--detach", "--name", name, "--network", "none", *options, image, *command)
            yield DockerContainer(self, name)
        finally:
            self.docker("rm", "--force", "--volumes", name)

    @contextmanager
    def refused(self, image: str, *options: str) -> Iterator[tuple[DockerContainer, str]]:
        """A container that docker makes and cannot start, and what it says about that; removed afterwards."""
        name = f"nvct-{uuid.uuid4().hex[:12]}"
        try:
            self.docker("run", "--detach", "--name", name, "--network", "none", *options, image, "sleep", "600")
        except DockerError as error:
            yield DockerContainer(self, name), str(error)
        else:
            raise AssertionError(f"docker started a container with {options}")
        finally:
            self.docker("rm", "--force", "--volumes", name)

    def hook_said(self, container: DockerContainer) -> str:
        """What the hook of a container under LESSER_RUNC wrote to its standard error at the last start."""
        identity = self.docker("inspect", "--format", "{{.Id}}", container.name)
        return (self.folder / f"{identity}.hook").read_text()

    def content(self, name: str) -> dict[str, Member]:
        """The container's own file system, without what is mounted over it: path below its root → what is there."""
        done = self._run("export", name)
        if done.returncode:
            raise DockerError(done.stderr.decode())
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            return {member.name.rstrip("/"): _member(member) for member in archive}

    def file(self, name: str, path: str) -> bytes:
        """A file of the container's own file system."""
        with tarfile.open(fileobj=io.BytesIO(self._run("cp", f"{name}:{path}", "-").stdout)) as archive:
            file = archive.extractfile(archive.next() or "")
            assert file, f"{path} is no file"
            return file.read()

    def leftovers(self, stopped: bool = False, patience: float = 10) -> list[str]:
        """Mounts and processes of containers, which there are none of without a container.

        `stopped`: those of dockerd itself count too. `patience`: seconds to wait for processes that are about to end.
        """
        deadline = time.monotonic() + patience
        while (found := self._mounts(stopped) + self._processes(stopped)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _mounts(self, stopped: bool) -> list[str]:
        own = set() if stopped else {f"{self.folder}/data"}
        rows = [line.split()[3:5] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return [place for root, place in rows if (self._is_ours(root) or self._is_ours(place)) and place not in own]

    def _processes(self, stopped: bool) -> list[str]:
        return [text for text in _command_lines() if self._is_ours(text) and (stopped or "shim" in text)]

    def _is_ours(self, text: str) -> bool:
        return str(self.folder) in text or str(self.node) in text


class DockerContainer:
    """A container of a Dockerd; `process` and what uses it follow it through restarts."""

    def __init__(self, dockerd: Dockerd, name: str) -> None:
        self.dockerd = dockerd
        self.name = name

    @property
    def process(self) -> Path:
        """The /proc folder of its program."""
        return Path("/proc", self.dockerd.docker("inspect", "--format", "{{.State.Pid}}", self.name))

    def run(self, *command: str, user: str = "") -> str:
        """What a program in the container prints; DockerError where its exit status is not 0."""
        return self.dockerd.docker("exec", *(("--user", user) if user else ()), self.name, *command)

    def sh(self, script: str, user: str = "") -> str:
        """What a shell script in the container prints, errors included, whatever its exit status."""
        return self.run("sh", "-c", f"{{ {script}\n}} 2>&1; true", user=user)

    def seen(self) -> list[str]:
        """The UUIDs that `nvidia-smi -L` lists in the container, in its order."""
        lines = self.run("nvidia-smi", "-L").splitlines()
        return [line.rpartition("UUID: ")[2].rstrip(")") for line in lines if "UUID: " in line]

    def nodes(self) -> dict[str, tuple[int, int]]:
        """Path → (major, minor) of the GPU device nodes in the container's /dev."""
        return device_nodes(self.process / "root")

    def opens(self, numbers: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """Those of the devices (major, minor) that root in the container can open, by nodes of its own making."""
        listed = sorted(numbers)
        tries = [f"echo @; ( {OPEN_DEVICE.format(major=major, minor=minor)} )" for major, minor in listed]
        answers = self.sh("\n".join(tries), user="0").split("@\n")[1:]
        assert len(answers) == len(listed)
        return {pair for pair, answer in zip(listed, answers) if DENIED not in answer}

    def mounts(self) -> list[str]:
        """The mount points in the container, each as often as it is mounted on."""
        return sorted(line.split()[4] for line in (self.process / "mountinfo").read_text().splitlines())

    def device_rules(self) -> list[str]:
        """The rules of its device cgroup, v1."""
        for line in (self.process / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "devices":
                return sorted(Path(f"/sys/fs/cgroup/devices{path}/devices.list").read_text().splitlines())
        return []

    def added(self, image: str) -> dict[str, Member]:
        """What its writable layer has that the image has not, or has otherwise."""
        fresh = self.dockerd.docker("create", "--network", "none", image, "true")
        before = self.dockerd.content(fresh)
        self.dockerd.docker("rm", fresh)
        return {path: found for path, found in self.dockerd.content(self.name).items() if before.get(path) != found}


@contextmanager
def dockerd_on(
    node: SimNode, folder: Path, options: Sequence[str] = (), prefix: Sequence[str] = ()
) -> Iterator[Dockerd]:
    """A dockerd for tests on a node: in the end nothing of it, its containers or the node is mounted or runs."""
    dockerd = Dockerd(folder, node.path, options, prefix)
    with dockerd:
        yield dockerd
        assert dockerd.leftovers() == []
    assert dockerd.leftovers(stopped=True) == []


def assert_exactly(
    container: DockerContainer, node: SimNode, wanted: tuple[str, ...], listing: bool = True, graphics: bool = False
) -> None:
    """The container sees and can open the wanted GPUs ("2") and MIG devices ("0:1"), and no other device of the node.

    `listing`: it can run the driver's programs. `graphics`: it has the DRM nodes of GPUs that are not in MIG mode.
    """
    chosen = sorted(wanted + tuple({node.mig[name].gpu for name in wanted if name in node.mig}))
    nodes = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
    for name in chosen:
        if name in node.gpus:
            nodes.add(f"/dev/nvidia{node.gpus[name].minor}")
            nodes |= node.drm(node.gpus[name])[0].keys() if graphics and name not in node.mig_mode else set()
        else:
            device = node.mig[name]
            nodes |= {f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (device.gi_minor, device.ci_minor)}
    made = device_nodes(node.path)
    numbers = {path: number for path, number in made.items() if path in nodes}
    _same("device nodes", container.nodes(), numbers)
    _same("devices that it can open", container.opens(set(made.values())), set(numbers.values()))
    if listing:
        _same("nvidia-smi -L", container.seen(), [(node.gpus.get(name) or node.mig[name]).uuid for name in chosen])


def _same(what: str, found: object, expected: object) -> None:
    assert found == expected, f"{what} of the container: {found}, expected {expected}"


def device_nodes(root: Path) -> dict[str, tuple[int, int]]:
    """Path below `root` → (major, minor) of the device nodes of a GPU driver in its dev folder."""
    found = {}
    for folder, _, names in os.walk(root / "dev"):
        for name in names:
            path = Path(folder, name)
            place = str(path).removeprefix(str(root))
            if path.is_char_device() and place.startswith(("/dev/nvidia", "/dev/dri")) and not path.is_symlink():
                status = path.stat()
                found[place] = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return found


def _member(member: tarfile.TarInfo) -> Member:
    kinds = {tarfile.REGTYPE: "file", tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "link", tarfile.LNKTYPE: "link"}
    return Member(kinds.get(member.type, "other"), member.size, member.linkname)


def _tar(root: Path) -> bytes:
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w") as archive:
        archive.add(root, ".")
    return text.getvalue()


def _cgroups() -> list[Path]:
    """The folders below which dockerd makes its containers' cgroups; it leaves them behind."""
    return [*Path("/sys/fs/cgroup").glob("docker"), *Path("/sys/fs/cgroup").glob("*/docker")]


def _command_lines() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            yield (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
