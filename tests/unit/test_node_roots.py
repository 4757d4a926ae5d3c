"""Paths inside a driver root: links stay inside, answers agree with the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvct.node.roots import on_host, resolve


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/file").write_text("inside")
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/real.so.1.2").write_text("x")
    return tmp_path


def link(root: Path, path: str, target: str) -> None:
    (root / path).symlink_to(target)


@pytest.mark.parametrize("target", ["usr/lib", "/usr/lib", "../../../usr/lib", "/usr/./lib/", "usr/lib/../lib"])
def test_links_lead_to_places_in_the_root(root: Path, target: str) -> None:
    link(root, "lib", target)
    assert resolve(str(root), "/lib/real.so.1.2") == "/usr/lib/real.so.1.2"


def test_a_link_to_the_hosts_file_means_the_roots(root: Path) -> None:
    link(root, "etc/escape", "/etc/hostname")
    with pytest.raises(FileNotFoundError, match=str(root)):
        resolve(str(root), "/etc/escape")
    link(root, "etc/inside", "../../../../etc/file")
    assert resolve(str(root), "/etc/inside") == "/etc/file"


def test_dots_at_the_top_stay_there(root: Path) -> None:
    assert resolve(str(root), "/../../etc/file") == "/etc/file"
    assert resolve(str(root), "/..") == "/"


def test_a_circle_of_links_ends(root: Path) -> None:
    link(root, "a", "b")
    link(root, "b", "a")
    with pytest.raises(OSError, match="Too many levels"):
        resolve(str(root), "/a")


def test_a_file_in_the_way_is_said(root: Path) -> None:
    with pytest.raises(NotADirectoryError):
        resolve(str(root), "/etc/file/below")


def test_on_the_hosts_own_root_it_agrees_with_the_kernel() -> None:
    for path in ("/bin/sh", "/proc/self/exe", "/usr/lib/../bin/env"):
        assert resolve("/", path) == os.path.realpath(path)


def test_on_host_joins_without_doubling_slashes() -> None:
    assert on_host("/", "/dev/null") == "/dev/null"
    assert on_host("/run/driver", "/dev/null") == "/run/driver/dev/null"
