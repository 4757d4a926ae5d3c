"""While nvct injects, another process exchanges the folders and files that it works on for links to the host.

That is what a container can do that shares a volume, or a layer that is still written, with one that starts. Each run
is a container of its own; the exchanges go on through all of them.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from nvct.inject import syscalls
from nvct.model import Edits
from nvct.sim.bundle import config, make_rootfs, write_config
from tests.conftest import PROGRAMS
from tests.support.bare import MISSING_CALLS
from tests.support.cage import Outcome, caged, edits_of, make_host, try_naive, try_nvct
from tests.support.canary import Canary
from tests.support.nodes import SimNode
from tests.support.runc import hooks_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root"),
]

UP = "../" * 20
RUNS = 2000

# What is exchanged for a link to the same place below the canary, in its folder.
FOLDERS = ("dev", "dev/nvidia-caps", "etc", "usr", "usr/lib64", "usr/bin", "lib/firmware/nvidia", "lib/firmware")
FOLDERS += ("run/nvidia-persistenced", "proc/driver/nvidia")
FILES = ("usr/bin/nvidia-smi", "usr/lib64/libcuda.so.550.1", "dev/nvidia0")


@pytest.fixture(scope="session")
def swapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("swapper") / "swapper"
    subprocess.run(["cc", "-O2", "-o", program, PROGRAMS / "swapper.c"], check=True)
    return program


class Image:
    """A root folder of the host's disk, where the exchanges can reach it, and from which each run takes its own."""

    def __init__(
        self, rootfs: Path, canary: Canary, folders: tuple[str, ...] = FOLDERS, files: tuple[str, ...] = FILES
    ) -> None:
        self.rootfs = rootfs
        self._pairs: list[str] = []
        # In-root, too, the links lead to something: else the first one of them would end every run.
        for top in (rootfs, Path(f"{rootfs}{canary.path}")):
            for folder in folders:
                (top / folder).mkdir(parents=True, exist_ok=True)
            (top / "file").touch()
        for name in folders:
            self._prepare(name, f"{canary.path}/{name}")
        for name in files:
            (rootfs / name).touch()
            self._prepare(name, str(canary.file))
        self._folder = os.open(rootfs, os.O_RDONLY | os.O_DIRECTORY)
        self._own: set[int] = set()
        self._clear(self._folder, lambda inode: self._own.add(inode) is None)

    def _prepare(self, name: str, target: str) -> None:
        place = self.rootfs / name
        beside = f"{place.name}~"
        (place.parent / beside).symlink_to(UP + target if len(self._pairs) % 2 else target)
        self._pairs += [str(place.parent), place.name, beside]

    def close(self) -> None:
        os.close(self._folder)

    @contextmanager
    def exchanges(self, swapper: Path) -> Iterator[None]:
        process = subprocess.Popen([swapper, *self._pairs], stdout=subprocess.PIPE)
        assert process.stdout and process.stdout.readline() == b"ready\n"
        try:
            yield
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def clean(self) -> None:
        """Remove what a run has made, by descriptors: names cannot be trusted here, as the test itself says."""
        self._clear(self._folder, lambda inode: inode in self._own)

    def _clear(self, folder: int, keep: Callable[[int], bool]) -> None:
        """Remove everything below the folder but what has an inode to keep, and do not mind exchanges meanwhile."""
        for name in os.listdir(folder):
            try:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            except OSError:  # a file, or a link
                inner = -1
            else:
                self._clear(inner, keep)
                os.close(inner)
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if keep(status.st_ino):
                continue
            with suppress(OSError):  # another stands there by now, which the next run clears
                (os.unlink if inner < 0 else os.rmdir)(name, dir_fd=folder)


class Race:
    def __init__(self, folder: Path, swapper: Path) -> None:
        self.canary = Canary(folder / "canary")
        self.edits: Edits = edits_of(make_host(folder / "host"))
        self.image = Image(folder / "rootfs", self.canary)
        self._swapper = swapper

    def run(self, kernel: str, runs: int, limit_s: float) -> list[Outcome]:
        """Outcomes of up to so many runs, in so many seconds. No kernel: of the naive injector, until it is beaten."""
        outcomes: list[Outcome] = []
        end = time.monotonic() + limit_s
        with self.image.exchanges(self._swapper):
            while len(outcomes) < runs and time.monotonic() < end:
                outcomes.append(Outcome(*caged(lambda: self._inject(kernel))))
                if not kernel and (outcomes[-1].escaped or self.canary.harm()):
                    return outcomes
                self.image.clean()
        return outcomes

    def _inject(self, kernel: str) -> Outcome:
        rootfs = self.image.rootfs
        syscalls.mount(str(rootfs), str(rootfs), "", syscalls.MS_BIND, "", str(rootfs))
        if not kernel:
            return try_naive(self.edits, rootfs, still=False)
        return try_nvct(self.edits, rootfs, kernel, still=False)


@pytest.fixture
def race(tmp_path: Path, swapper: Path) -> Iterator[Race]:
    race = Race(tmp_path, swapper)
    yield race
    race.image.close()
    race.canary.close()


def check(race: Race, outcomes: list[Outcome], kernel: str) -> None:
    assert race.canary.harm() == []
    assert [outcome.escaped for outcome in outcomes if outcome.escaped] == []
    mounted = f"{race.image.rootfs}/"
    for outcome in outcomes:
        assert "\n" not in outcome.error
        assert outcome.error == "" or outcome.error.startswith("InjectionError: ")
        left = [what for what in outcome.left if what.startswith(mounted)]
        # Before Linux 5.2 a mount whose place was taken away cannot be found; the error says that and the start fails.
        if outcome.error and not (kernel == "5.1" and "NOT undone, remove the container" in outcome.error):
            assert left == [], outcome.error
            assert "everything done before was undone" in outcome.error
    assert len(outcomes) > 100
    assert not all(outcome.error for outcome in outcomes)
    ends = {(bool(outcome.error), *outcome.left) for outcome in outcomes}
    assert len(ends) > 10, "all alike: the exchanges do not meet the injection"


@pytest.mark.parametrize("kernel", MISSING_CALLS)
def test_the_race_is_never_lost(race: Race, kernel: str) -> None:
    check(race, race.run(kernel, RUNS, limit_s=8), kernel)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernel", MISSING_CALLS)
def test_the_race_is_never_lost_in_two_thousand_runs(race: Race, kernel: str) -> None:
    outcomes = race.run(kernel, RUNS, limit_s=500)
    assert len(outcomes) == RUNS
    check(race, outcomes, kernel)


def test_a_naive_injector_loses_it(race: Race) -> None:
    outcomes = race.run("", RUNS, limit_s=20)
    assert outcomes[-1].escaped or race.canary.harm(), f"not in {len(outcomes)} runs"


# Without what runc itself needs, which is not what is tried here.
RUNC_FOLDERS = (f"usr/lib/{os.uname().machine}-linux-gnu", "etc", "usr/lib/firmware", "run/nvidia-persistenced")


def test_under_runc(dgx: SimNode, tmp_path: Path, swapper: Path, runc: None) -> None:
    canary = Canary(tmp_path / "canary")
    make_rootfs(tmp_path / "rootfs", "busybox")
    (tmp_path / "rootfs/etc/debian_version").touch()
    image = Image(tmp_path / "rootfs", canary, RUNC_FOLDERS, ())
    write_config(
        tmp_path, config(["/usr/bin/true"], {"NVIDIA_VISIBLE_DEVICES": "0:3,6"}, hooks_of(dgx.path), read_only=False)
    )
    command = ["runc", "--root", str(tmp_path / "state"), "run", "--bundle", str(tmp_path)]
    with image.exchanges(swapper):
        runs = [subprocess.run([*command, f"nvct-race-{n}"], capture_output=True, text=True) for n in range(20)]
    assert canary.harm() == []
    assert [run.stderr for run in runs if run.returncode and "nvct: " not in run.stderr] == []
    assert any(run.returncode == 0 for run in runs)
    image.close()
    canary.close()
