"""The file that holds the hook's modules: what it is good for, and when it is not believed."""

from __future__ import annotations

import marshal
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.runc import HOOK, TREE

STRANGER = 12345

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def tree() -> Iterator[Path]:
    """A copy of the code where only root can write, without any compiled file."""
    folder = Path(tempfile.mkdtemp(prefix="nvct-test-", dir="/run"))
    for name in ("hooks", "nvct"):
        shutil.copytree(TREE / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chmod", "-R", "go-w,go+rX", folder], check=True)
    yield folder
    shutil.rmtree(folder)


def run(tree: Path, *under: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*under, tree / "hooks" / HOOK.name, "-help"], capture_output=True, text=True)


def started(tree: Path) -> Path:
    """Start the hook, which writes the file."""
    assert run(tree).returncode == 0
    (file,) = tree.glob("nvct/__pycache__/hook.*.code")
    return file


def trapped(file: Path) -> Path:
    """The file with a first module that ends the hook: whether it is run is then easily told."""
    magic, versions, modules = marshal.loads(file.read_bytes())
    code = compile("import os; os._exit(42)", "trap", "exec")
    file.write_bytes(marshal.dumps((magic, versions, [("nvct.oci", "/trap.py", True, code), *modules])))
    return file


def test_a_start_writes_the_file_and_the_next_one_reads_it(tree: Path) -> None:
    trapped(started(tree))
    assert run(tree).returncode == 42


@pytest.mark.parametrize(("program", "name"), [("nvct-cdi-hook", "cdi-hook"), ("nvct-runtime", "runtime")])
def test_the_other_programs_do_so_too(tree: Path, program: str, name: str) -> None:
    command = [tree / "hooks" / program, *(["--version"] if name == "cdi-hook" else ["create", "--help"])]
    assert subprocess.run(command, capture_output=True, cwd=tree).returncode == 0
    (file,) = tree.glob("nvct/__pycache__/*.code")
    assert file.name.startswith(f"{name}.")
    trapped(file)
    assert subprocess.run(command, capture_output=True, cwd=tree).returncode == 42


@pytest.mark.skipif(not shutil.which("strace"), reason="strace shows what is opened; it is not installed")
def test_no_other_module_is_opened_then(tree: Path) -> None:
    started(tree)
    said = run(tree, "strace", "-f", "-e", "trace=openat", "-e", "signal=none").stderr
    opened = re.findall(rf'openat\(AT_FDCWD, "{tree}/nvct/(.*?)\.[^/]*", O_RDONLY\|[^)]*\) = [0-9]', said)
    files = [name for name in opened if "__pycache__" in name]
    assert files == [f"__pycache__/{name}" for name in ("__init__", "start", "trust", "hook")]


def test_a_changed_source_counts_at_once(tree: Path) -> None:
    trapped(started(tree))
    source = tree / "nvct/oci/hook.py"
    source.write_text(source.read_text().replace("usage: ", "Usage: "))
    assert run(tree).stdout.startswith("Usage: ")
    started(tree)
    assert run(tree).stdout.startswith("Usage: ")


@pytest.mark.parametrize("name", ["trust", "start"])
def test_so_does_a_change_of_what_looks(tree: Path, name: str) -> None:
    trapped(started(tree))
    source = tree / f"nvct/{name}.py"
    source.write_text(source.read_text() + "# changed\n")
    assert run(tree).returncode == 0


HARM: dict[str, Callable[[Path], object]] = {
    "a stranger's": lambda file: os.chown(file, STRANGER, 0),
    "for all to write": lambda file: file.chmod(0o666),
    "for the group to write": lambda file: file.chmod(0o664),
    "a link": lambda file: (file.rename(file.with_name("elsewhere")), file.symlink_to("elsewhere")),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_file_that_a_stranger_can_have_written_is_not_run(tree: Path, harm: Callable[[Path], object]) -> None:
    harm(trapped(started(tree)))
    done = run(tree)
    assert (done.returncode, done.stderr) == (0, "")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda content: content[: len(content) // 2],
    "noise": lambda _: bytes(range(256)) * 9,
    "a number": lambda _: marshal.dumps(7),
    "another interpreter's": lambda content: marshal.dumps((b"other", *marshal.loads(content)[1:])),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_written_anew(tree: Path, damage: Callable[[bytes], bytes]) -> None:
    file = started(tree)
    good = file.read_bytes()
    file.write_bytes(damage(good))
    done = run(tree)
    assert (done.returncode, done.stderr) == (0, "")
    assert marshal.loads(file.read_bytes())[:2] == marshal.loads(good)[:2]
    assert (file.stat().st_uid, file.stat().st_mode & 0o777) == (0, 0o644)


def test_a_tree_that_takes_no_file_works(tree: Path) -> None:
    (tree / "nvct/__pycache__").write_text("no folder")
    done = run(tree)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in tree.glob("nvct/hook*")) == []


def test_many_first_starts_at_once_leave_one_good_file(tree: Path) -> None:
    command = [tree / "hooks" / HOOK.name, "-help"]
    starts = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(8)]
    assert [start.wait() for start in starts] == [0] * 8
    assert [path.suffix for path in tree.glob("nvct/__pycache__/hook*")] == [".code"]
    trapped(started(tree))
    assert run(tree).returncode == 42
