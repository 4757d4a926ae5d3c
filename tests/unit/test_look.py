"""What a container's root file system looks like: facts for plan, from roots made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvct.inject.look import look
from nvct.inject.rootfs import ConfinedRoot
from nvct.model import ContainerRoot

MACHINE = os.uname().machine


def seen(root: Path) -> ContainerRoot:
    confined = ConfinedRoot(os.open(root, os.O_PATH | os.O_DIRECTORY))
    try:
        return look(confined)
    finally:
        confined.close()


def write(root: Path, path: str, content: bytes = b"") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)


def elf(machine: int, big: bool = False) -> bytes:
    order = "big" if big else "little"
    return b"\x7fELF\x02" + (b"\x02" if big else b"\x01") + bytes(12) + machine.to_bytes(2, order)  # type: ignore[arg-type]


def test_an_empty_root(tmp_path: Path) -> None:
    assert seen(tmp_path) == ContainerRoot(debian=False)


def test_folders(tmp_path: Path) -> None:
    write(tmp_path, "etc/debian_version")
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib32").mkdir()
    (tmp_path / "usr/lib64").symlink_to("lib")
    found = seen(tmp_path)
    assert (found.debian, found.lib32, found.lib_is_lib64) == (True, True, True)


@pytest.mark.parametrize(
    ("path", "header", "architecture"),
    [
        ("bin/sh", elf(62), "x86_64"),
        ("bin/sh", elf(183), "aarch64"),
        ("lib64/libc.so.6", elf(183), "aarch64"),
        ("lib/aarch64-linux-gnu/libc.so.6", elf(183), "aarch64"),
        ("bin/sh", elf(22, big=True), "s390x"),
        ("bin/sh", elf(3), ""),  # 32-bit programs
        ("bin/sh", b"#!/bin/busybox sh\n", ""),
        ("bin/sh", b"\x7fELF", ""),
        ("bin/sh", b"", ""),
    ],
)
def test_architectures(tmp_path: Path, path: str, header: bytes, architecture: str) -> None:
    write(tmp_path, path, header)
    assert seen(tmp_path).architecture == architecture


def test_links_stay_inside(tmp_path: Path) -> None:
    """The image's /bin/sh is a link to a path of the host."""
    root = tmp_path / "root"
    write(tmp_path, "outside", elf(62))
    (root / "bin").mkdir(parents=True)
    (root / "bin/sh").symlink_to(tmp_path / "outside")
    assert seen(root).architecture == ""


def test_pipes_do_not_block(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    os.mkfifo(tmp_path / "bin/sh")
    write(tmp_path, f"lib/ld-musl-{MACHINE}.so.1")
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / f"etc/ld-musl-{MACHINE}.path")
    assert seen(tmp_path).architecture == ""
    assert seen(tmp_path).musl is not None


@pytest.mark.parametrize(
    ("listed", "musl"),
    [
        (None, "/lib:/usr/local/lib:/usr/lib\n"),
        (b"/lib\n/opt/lib\n", "/lib\n/opt/lib\n"),
        (b"", ""),
        (b"\xff\xfe", None),
    ],
)
def test_musl(tmp_path: Path, listed: bytes | None, musl: str | None) -> None:
    write(tmp_path, f"lib/ld-musl-{MACHINE}.so.1")
    if listed is not None:
        write(tmp_path, f"etc/ld-musl-{MACHINE}.path", listed)
    assert seen(tmp_path).musl == musl


@pytest.mark.parametrize("loader", ["lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1"])
def test_musl_beside_glibc_is_not_the_images_own(tmp_path: Path, loader: str) -> None:
    """Debian's package musl, for one, which those install who build static programs."""
    write(tmp_path, f"lib/ld-musl-{MACHINE}.so.1")
    write(tmp_path, loader)
    assert seen(tmp_path).musl is None


def test_another_machines_musl_is_none(tmp_path: Path) -> None:
    write(tmp_path, "lib/ld-musl-riscv64.so.1")
    assert seen(tmp_path).musl is None
