"""Every path that nvct touches in a container, every component of it, replaced by whatever an image can hold.

A table: component x attack x kernel. The host is never changed, and the container has either all that it should, as
its own programs see it, or all that it had, and a line that says why.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from nvct.inject import syscalls
from nvct.model import Edits
from tests.support.bare import MISSING_CALLS
from tests.support.cage import Outcome, caged, components_of, edits_of, make_host, targets_of, try_naive, try_nvct
from tests.support.canary import Canary

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root"),
]

UP = "../" * 20
Attack = Callable[[str, Canary], None]


def link(text: str, shadow: bool = False) -> Attack:
    """A link of this text, with {canary} filled in. `shadow`: the image has the same folders at the same place."""

    def make(at: str, canary: Canary) -> None:
        os.symlink(text.format(canary=canary.path), at)
        if shadow:
            rootfs = at[: at.index("/rootfs/") + len("/rootfs")]
            os.makedirs(f"{rootfs}{canary.folder}", exist_ok=True)
            Path(f"{rootfs}{canary.file}").write_text("of the image")

    return make


def two_links(at: str, _: Canary) -> None:
    os.symlink(f"{os.path.basename(at)}.other", at)
    os.symlink(os.path.basename(at), f"{at}.other")


def bound_socket(at: str, _: Canary) -> None:
    # A socket's path is short (108 bytes), so it is bound under the name alone.
    here = os.open(".", os.O_PATH)
    os.chdir(os.path.dirname(at))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.basename(at))
    os.fchdir(here)
    os.close(here)


def node(kind: int, number: tuple[int, int]) -> Attack:
    return lambda at, _: os.mknod(at, kind | 0o666, os.makedev(*number))


def full_folder(at: str, _: Canary) -> None:
    os.mkdir(at)
    Path(at, "file").write_text("of the image")


ATTACKS: dict[str, Attack] = {
    "absolute link to a folder": link("{canary}/folder"),
    "absolute link to a folder that the image has, too": link("{canary}/folder", shadow=True),
    "absolute link to a file": link("{canary}/file"),
    "absolute link to a file that the image has, too": link("{canary}/file", shadow=True),
    "climbing link to a folder": link(UP + "{canary}/folder"),
    "climbing link to a folder that the image has, too": link(UP + "{canary}/folder", shadow=True),
    "climbing link to a file": link(UP + "{canary}/file"),
    "link to what is absent": link("{canary}/absent/below"),
    "link to nothing beside it": link("nothing"),
    "link to itself": lambda at, _: os.symlink(os.path.basename(at), at),
    "two links in a circle": two_links,
    "link to the root": link("/"),
    "climbing link to the root": link(UP),
    "link to its folder": link("."),
    "link into /proc/self/root": link("/proc/self/root{canary}/folder"),
    "link into /proc/self/cwd": link("/proc/self/cwd/folder"),
    "link to another process's root": link("/proc/1/root{canary}/folder"),
    "link to a descriptor": link("/proc/self/fd/0"),
    "climbing link to a descriptor": link(UP + "proc/self/fd/0/folder"),
    "link of 4000 bytes": link("./" * 1980 + "{canary}/folder"),
    "fifo": lambda at, _: os.mkfifo(at),
    "socket": bound_socket,
    "device node": node(0o020000, (1, 3)),
    "block device": node(0o060000, (7, 200)),
    "whiteout": node(0o020000, (0, 0)),
    "empty folder": lambda at, _: os.mkdir(at),
    "full folder": full_folder,
    "empty file": lambda at, _: Path(at).touch(),
    "full file": lambda at, _: Path(at).write_text("of the image") and None,
}


@pytest.fixture
def edits(tmp_path: Path) -> Edits:
    return edits_of(make_host(tmp_path / "host"))


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    (tmp_path / "rootfs").mkdir()
    return tmp_path / "rootfs"


def furnish(rootfs: Path, host: Path, component: str, attack: Attack, canary: Canary) -> None:
    """In the cage: an image with the attack in the place of the component, and the mounts of a runtime."""
    syscalls.mount("image", str(rootfs), "tmpfs", 0, "mode=755", str(rootfs))
    for folder in ("dev", "etc", "usr/lib64", "usr/bin", "run", "lib/firmware", "proc/driver/nvidia/gpus"):
        (rootfs / folder).mkdir(parents=True)
    at = f"{rootfs}{component}"
    if os.path.isdir(at):
        shutil.rmtree(at)
    os.makedirs(os.path.dirname(at), exist_ok=True)
    attack(at, canary)
    # Where the attack is below /proc, it is that of a runtime which left the image's /proc there.
    if not component.startswith("/proc"):
        syscalls.mount("proc", f"{rootfs}/proc", "proc", 0, "", "proc")
        syscalls.mount(f"{host}/driver", f"{rootfs}/proc/driver", "", syscalls.MS_BIND, "", "driver")
    # What links into /proc/self lead to: the current folder and descriptor 0 are the canary's.
    os.chdir(canary.path)
    os.dup2(os.open(canary.path, os.O_PATH), 0)


def attacked(edits: Edits, rootfs: Path, component: str, attack: Attack, canary: Canary, kernel: str) -> Outcome:
    def act() -> Outcome:
        furnish(rootfs, rootfs.with_name("host"), component, attack, canary)
        return try_nvct(edits, rootfs, kernel) if kernel else try_naive(edits, rootfs)

    return Outcome(*caged(act))


def complaints(outcome: Outcome) -> list[str]:
    found = [f"escaped to {point}" for point in outcome.escaped] + outcome.wrong
    if outcome.error:
        found += [f"left {what}" for what in outcome.left]
        told = outcome.error.startswith("InjectionError: ") and "everything done before was undone" in outcome.error
        found += [] if told and "\n" not in outcome.error else [outcome.error]
    return found


@pytest.mark.parametrize("kernel", MISSING_CALLS)
@pytest.mark.parametrize("name", ATTACKS)
def test_the_host_is_safe_and_the_container_whole(
    edits: Edits, rootfs: Path, canary: Canary, name: str, kernel: str
) -> None:
    errors = 0
    for component in components_of(edits):
        outcome = attacked(edits, rootfs, component, ATTACKS[name], canary, kernel)
        assert complaints(outcome) == [], f"{name} in the place of {component}"
        assert canary.harm() == [], f"{name} in the place of {component}"
        errors += bool(outcome.error)
    assert errors < len(components_of(edits)), "an attack on one place must not be felt at all others"


def test_without_an_attack_all_is_well(edits: Edits, rootfs: Path, canary: Canary) -> None:
    """What the table's outcomes are measured by."""
    outcome = attacked(edits, rootfs, "/unused", ATTACKS["empty file"], canary, "today")
    assert (outcome.error, outcome.warnings, outcome.escaped, outcome.wrong) == ("", [], [], [])
    assert {"/usr/bin/nvidia-smi", "/etc/ld.so.cache", "/dev/nvidia-caps"} <= {
        path.removeprefix(str(rootfs)) for path in outcome.left
    }


WAYS_OUT = [name for name in ATTACKS if "link to a folder" in name or "/proc/self" in name or "descriptor" in name]


@pytest.mark.parametrize("name", WAYS_OUT)
def test_a_naive_injector_is_led_out(edits: Edits, rootfs: Path, tmp_path: Path, name: str) -> None:
    """Each of these attacks works, at each folder on the way to a file: so there is something to withstand."""
    safe = []
    folders = {folder for folder in components_of(edits) if folder not in targets_of(edits) and folder[:5] != "/proc"}
    for number, folder in enumerate(sorted(folders)):
        canary = Canary(tmp_path / f"canary{number}")
        outcome = attacked(edits, rootfs, folder, ATTACKS[name], canary, kernel="")
        if not canary.harm() and not outcome.escaped:
            safe.append(folder)
        canary.close()
    assert safe == []


def test_a_naive_injector_follows_the_last_link_too(edits: Edits, rootfs: Path, tmp_path: Path) -> None:
    followed = set()
    for number, target in enumerate(targets_of(edits)):
        canary = Canary(tmp_path / f"canary{number}")
        outcome = attacked(edits, rootfs, target, ATTACKS["absolute link to a file"], canary, kernel="")
        followed |= {target} if canary.harm() or outcome.escaped else set()
        canary.close()
    assert {"/usr/bin/nvidia-smi", "/etc/ld.so.cache", "/dev/nvidia0"} <= followed
