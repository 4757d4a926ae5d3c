"""What is read of the image's forward compatibility libraries: names and a note, from files that may be anything."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from node_tree import shared_object

from nvct.inject.compat import find_compat
from nvct.inject.rootfs import ConfinedRoot
from nvct.model import CompatFolder

FOLDER = "/usr/local/cuda/compat"
NOTE = '{"Format": 1, "CUDA Version": "12.9", "Driver": [535, 550, 570]}'

SOURCE = """
__attribute__((section(".note.cuda.fwd_compatibility"), aligned(4), used))
static const struct { unsigned owner, text, kind; char name[20]; char json[%d]; } note =
    { 19, %d, 1, "NVIDIA Corporation", %s };
int cuInit(void) { return 0; }
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@cache
def libcuda(note: str) -> bytes:
    """A shared object with the note, or without one for ""."""
    if not note:
        return shared_object("libcuda.so.1")
    quoted = '"' + note.replace('"', '\\"') + '"'
    with NamedTemporaryFile("w", suffix=".c") as source:
        source.write(SOURCE % ((len(note) + 4) // 4 * 4, len(note) + 1, quoted))
        source.flush()
        return shared_object("libcuda.so.1", source.name, ("-nostdlib",))


@pytest.fixture(params=["kernel", "walk"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> ConfinedRoot:
    (tmp_path / "root").mkdir()
    confined = ConfinedRoot(os.open(tmp_path / "root", os.O_PATH))
    confined._kernel_resolves = request.param == "kernel"
    return confined


def put(tmp_path: Path, folder: str = FOLDER, note: str = NOTE, version: str = "575.57.08") -> Path:
    place = tmp_path / "root" / folder[1:]
    place.mkdir(parents=True)
    (place / f"libcuda.so.{version}").write_bytes(libcuda(note))
    (place / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")
    return place


def test_names_and_note(root: ConfinedRoot, tmp_path: Path) -> None:
    place = put(tmp_path)
    (place / "README").touch()
    (place / "libdir.so.1").mkdir()
    (place / "libtext.so.1").write_text("no ELF file")
    (place / "libfifo.so.1").unlink(missing_ok=True)
    os.mkfifo(place / "libfifo.so.1")
    assert find_compat(root) == CompatFolder(FOLDER, ("libcuda.so.1", "libcuda.so.575.57.08"), NOTE)


def test_a_library_without_a_note(root: ConfinedRoot, tmp_path: Path) -> None:
    put(tmp_path, note="")
    assert find_compat(root) == CompatFolder(FOLDER, ("libcuda.so.1", "libcuda.so.575.57.08"))


def test_no_folder(root: ConfinedRoot, tmp_path: Path) -> None:
    assert find_compat(root) is None
    (tmp_path / "root/usr/local/cuda").mkdir(parents=True)
    (tmp_path / "root/usr/local/cuda/compat").touch()
    assert find_compat(root) is None


@pytest.mark.parametrize("on_host_too", [False, True])
def test_links_of_the_image_are_followed_inside_it(root: ConfinedRoot, tmp_path: Path, on_host_too: bool) -> None:
    """/usr/local/cuda is an absolute link to alternatives; the host's own path of that name is never read."""
    real = tmp_path / "alternative"  # a path that exists on the host, or does not, and inside the root
    put(tmp_path, f"{real}/compat")
    if on_host_too:
        (real / "compat").mkdir(parents=True)
        (real / "compat/libcuda.so.1.2.3").write_bytes(libcuda(NOTE))
    (tmp_path / "root/etc/alternatives").mkdir(parents=True)
    (tmp_path / "root/etc/alternatives/cuda").symlink_to(real)
    (tmp_path / "root/usr/local").mkdir(parents=True)
    (tmp_path / "root/usr/local/cuda").symlink_to("/etc/alternatives/cuda")
    found = find_compat(root)
    assert found is not None
    assert found.names == ("libcuda.so.1", "libcuda.so.575.57.08")


def test_a_link_to_the_host_leads_nowhere(root: ConfinedRoot, tmp_path: Path) -> None:
    place = put(tmp_path)
    outside = tmp_path / "libcuda.so.999.1"
    outside.write_bytes(libcuda(""))
    for name, text in (("libcuda.so.999.1", str(outside)), ("libcuda.so.998.1", "../" * 20 + str(outside)[1:])):
        (place / name).symlink_to(text)
    found = find_compat(root)
    assert found is not None
    assert found.names == ("libcuda.so.1", "libcuda.so.575.57.08")


def test_many_names_are_cut_short(root: ConfinedRoot, tmp_path: Path) -> None:
    place = put(tmp_path)
    for number in range(200):
        os.link(place / "libcuda.so.575.57.08", place / f"libx{number}.so.1")
    found = find_compat(root)
    assert found is not None
    assert len(found.names) == 64


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 1 << 14), at=st.integers(0, 1 << 14), junk=st.binary(max_size=12))
def test_a_damaged_library_is_read_within_bounds(
    tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, junk: bytes
) -> None:
    content = bytearray(libcuda(NOTE))
    headers = int.from_bytes(content[0x28:0x30], "little")
    at = at % 64 if at % 2 else (headers + at) % len(content)  # where it hurts: the header and the section headers
    content[at : at + len(junk)] = junk
    place = tmp_path_factory.mktemp("damaged")
    folder = place / FOLDER[1:]
    folder.mkdir(parents=True)
    (folder / "libcuda.so.575.57.08").write_bytes(content[: cut or None])
    root = ConfinedRoot(os.open(place, os.O_PATH))
    found = find_compat(root)
    root.close()
    assert found is not None
    assert found.names in ((), ("libcuda.so.575.57.08",))
    assert len(found.note) <= 4096
