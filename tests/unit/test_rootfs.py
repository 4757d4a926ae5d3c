"""The confined root: nothing leads out of it, and both ways of resolving a path give the same answers."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvct.inject.rootfs import ConfinedRoot

FLAGS = (os.O_PATH, os.O_PATH | os.O_NOFOLLOW, os.O_RDONLY | os.O_NONBLOCK, os.O_PATH | os.O_DIRECTORY)


def confine(path: Path, by_kernel: bool = True) -> ConfinedRoot:
    root = ConfinedRoot(os.open(path, os.O_PATH))
    root._kernel_resolves = by_kernel
    return root


@pytest.fixture(params=["kernel", "walk"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ConfinedRoot]:
    (tmp_path / "root").mkdir()
    confined = confine(tmp_path / "root", request.param == "kernel")
    yield confined
    confined.close()


def answer(root: ConfinedRoot, path: str, flags: int) -> object:
    """What stands at the path, as inode and kind, or the errno."""
    try:
        descriptor = root.open(path, flags)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    status = os.fstat(descriptor)
    os.close(descriptor)
    return status.st_dev, status.st_ino, status.st_mode


NAMES = st.sampled_from(["a", "b", "c"])
TEXTS = st.lists(st.sampled_from(["a", "b", "c", "..", ".", ""]), min_size=1, max_size=6).map("/".join).filter(bool)
NODES = st.one_of(st.just("folder"), st.just("file"), st.just("fifo"), TEXTS)
TREES = st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=3).map("/".join), NODES), max_size=8)


def plant(root: Path, tree: list[tuple[str, str]]) -> None:
    for path, node in tree:
        place = root / path
        try:
            if node == "folder":
                place.mkdir()
            elif node == "file":
                place.touch(exist_ok=False)
            elif node == "fifo":
                os.mkfifo(place)
            else:
                place.symlink_to(node)
        except OSError:
            continue  # a link or file in the way: such trees are made too


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES, path=TEXTS)
def test_kernel_and_walk_agree(
    tmp_path_factory: pytest.TempPathFactory, tree: list[tuple[str, str]], path: str
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    (folder / "root").mkdir()
    # A link planted through a link could write outside; the tree then has a canary beside it, not under it.
    plant(folder / "root", [(where, node) for where, node in tree if not (folder / "root" / where).parent.is_symlink()])
    kernel, walk = confine(folder / "root"), confine(folder / "root", by_kernel=False)
    for flags in FLAGS:
        assert answer(walk, path, flags) == answer(kernel, path, flags), (path, flags)
    kernel.close()
    walk.close()


@pytest.mark.parametrize("link", ["/secret", "../secret", "../../../../../../secret", "/../secret"])
def test_links_stay_inside(root: ConfinedRoot, tmp_path: Path, link: str) -> None:
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "root" / "way").symlink_to(link)
    with pytest.raises(FileNotFoundError):
        root.open("/way")
    (tmp_path / "root" / "secret").write_text("inside")
    descriptor = root.open("/way")
    assert root.read(descriptor, "/way", 100) == b"inside"


@pytest.mark.parametrize("path", ["self/root", "self/cwd", "self/fd/0", "self/exe", "self/ns/mnt", "self/root/etc"])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_magic_links_are_refused(path: str, by_kernel: bool) -> None:
    host = confine(Path("/"), by_kernel)
    with pytest.raises(OSError) as caught:
        host.open(f"/proc/{path}")
    assert caught.value.errno == errno.ELOOP
    host.close()


@pytest.mark.parametrize("by_kernel", [True, False])
def test_the_honest_links_of_procfs_are_followed(by_kernel: bool) -> None:
    host = confine(Path("/"), by_kernel)
    for path in ("/proc/self/status", "/proc/mounts", "/proc/net/dev", "/proc/thread-self/status"):
        os.close(host.open(path))
    host.close()


def test_an_old_kernel_is_noticed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def without_openat2(*arguments: object) -> int:
        calls.append(arguments)
        raise OSError(errno.ENOSYS, "not implemented")

    (tmp_path / "file").write_text("")
    root = confine(tmp_path)
    monkeypatch.setattr("nvct.inject.syscalls.openat2", without_openat2)
    os.close(root.open("/file"))
    os.close(root.open("/file"))
    assert len(calls) == 1
    root.close()


def test_folder_makes_what_is_missing_and_tells(root: ConfinedRoot, tmp_path: Path) -> None:
    made: list[str] = []
    (tmp_path / "root" / "usr").mkdir()
    os.close(root.folder("/usr/lib/deep", lambda parent, name: made.append(name)))
    assert made == ["lib", "deep"]
    assert (tmp_path / "root/usr/lib/deep").is_dir()
    os.close(root.folder("/usr/lib/deep", lambda parent, name: made.append(name)))
    assert made == ["lib", "deep"]


def test_folder_goes_through_links_inside(root: ConfinedRoot, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "root" / "outside").mkdir()
    (tmp_path / "root" / "lib").symlink_to("/outside")
    os.close(root.folder("/lib/new", lambda parent, name: None))
    assert (tmp_path / "root/outside/new").is_dir()
    assert list((tmp_path / "outside").iterdir()) == []


def test_folder_refuses_a_dangling_link(root: ConfinedRoot, tmp_path: Path) -> None:
    (tmp_path / "root" / "lib").symlink_to("/nowhere")
    with pytest.raises(OSError, match="leads nowhere"):
        root.folder("/lib/new", lambda parent, name: None)


def test_read_opens_regular_files_only(root: ConfinedRoot, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "root" / "fifo")
    (tmp_path / "root" / "big").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="not a regular file"):
        root.read(root.open("/fifo"), "/fifo", 10)
    with pytest.raises(OSError) as caught:
        root.read(root.open("/big"), "/big", 10)
    assert caught.value.errno == errno.EFBIG


def test_no_descriptor_is_left_open(root: ConfinedRoot, tmp_path: Path) -> None:
    (tmp_path / "root" / "a").mkdir()
    (tmp_path / "root" / "loop").symlink_to("loop")
    before = sorted(os.listdir("/proc/self/fd"))
    for path in ("/a", "/loop", "/a/missing", "/a/../a"):
        try:
            os.close(root.open(path))
        except OSError:
            continue
    assert sorted(os.listdir("/proc/self/fd")) == before
