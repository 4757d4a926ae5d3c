"""Code, settings and inventory that a stranger can have written are refused, and the refusal says what to do."""

from __future__ import annotations

import marshal
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path

import pytest

from nvct import settings
from nvct.errors import ConfigError
from nvct.node import cache
from nvct.trust import why_code_is_unsafe, why_environment_is_unsafe
from tests.support.nodes import SimNode
from tests.support.runc import HOOK, PYTHON, TREE, Start, StartFailed

STRANGER = 12345
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def tree() -> Iterator[Path]:
    """A copy of the code where only root can write; pytest's own folders are below /tmp, where everyone can."""
    folder = Path(tempfile.mkdtemp(prefix="nvct-test-", dir="/run"))
    for name in ("hooks", "nvct"):
        shutil.copytree(TREE / name, folder / name, symlinks=True)
    subprocess.run(["chmod", "-R", "go-w,go+rX", folder], check=True)
    yield folder
    shutil.rmtree(folder)


def run_hook(tree: Path, user: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tree / "hooks" / HOOK.name, "-version"], capture_output=True, text=True, user=user)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


# What is done to the code, where, and what the refusal must name.
HARM: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a module for all to write": ("nvct/oci/hook.py", lambda path: path.chmod(0o666), "chmod go-w {path}"),
    "a module for the group to write": ("nvct/record.py", lambda path: path.chmod(0o664), "chmod go-w {path}"),
    "a room for all to write": ("nvct/inject", lambda path: path.chmod(0o777), "chmod go-w {path}"),
    "the package for the group to write": ("nvct", lambda path: path.chmod(0o775), "chmod go-w {path}"),
    "the tree for all to write": (".", lambda path: path.chmod(0o757), "chmod go-w {path}"),
    "a sticky tree": (".", lambda path: path.chmod(0o1777), "chmod go-w {path}"),
    "a module of a stranger": ("nvct/plan/files.py", lambda path: os.chown(path, STRANGER, 0), "chown root {path}"),
    "a room of a stranger": ("nvct/node", lambda path: os.chown(path, STRANGER, 0), "chown root {path}"),
    "the hooks of a stranger": ("hooks", lambda path: os.chown(path, STRANGER, 0), "chown root {path}"),
    "the tree of a stranger": (".", lambda path: os.chown(path, STRANGER, 0), "chown root {path}"),
    "a module that is a link": ("nvct/fastjson.py", linked, "{path} is a symbolic link; put the file itself there"),
    "a room that is a link": ("nvct/plan", lambda path: linked(path), "{path} is a symbolic link"),
    "a room that is gone": (
        "nvct/plan",
        lambda path: shutil.rmtree(path),
        "{path}: No such file or directory; it cannot",
    ),
}


@needs_root
def test_a_tree_of_root_is_run(tree: Path) -> None:
    done = run_hook(tree)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("NVIDIA Container Runtime Hook version")


@needs_root
@pytest.mark.parametrize(("where", "harm", "remedy"), HARM.values(), ids=HARM)
def test_code_that_a_stranger_can_change_is_not_run(
    tree: Path, where: str, harm: Callable[[Path], object], remedy: str
) -> None:
    (tree / "nvct/oci/__init__.py").write_text("import os; os.mkdir('/run/nvct-was-run')")
    harm(tree / where)
    done = run_hook(tree)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("nvct: not run: ")
    assert remedy.format(path=tree / where) in line
    assert not os.path.exists("/run/nvct-was-run")


@needs_root
def test_a_users_own_tree_is_run_by_that_user_and_not_by_root(tree: Path, tmp_path: Path) -> None:
    subprocess.run(["chown", "-R", str(NOBODY), tree], check=True)
    assert run_hook(tree, NOBODY).returncode == 0
    assert f"belongs to uid {NOBODY}, expected root or uid 0; run: chown root" in run_hook(tree).stderr
    assert run_hook(tree, STRANGER).returncode == 1


@needs_root
@pytest.mark.parametrize(("owner", "status"), [(0, 0), (STRANGER, 1)], ids=["root", "a stranger"])
def test_a_tree_may_lie_in_a_folder_like_tmp_that_is_roots(tree: Path, owner: int, status: int) -> None:
    """Nobody but its owner can rename what is another's there."""
    shared = tree.with_name(f"{tree.name}-shared")
    shared.mkdir()
    try:
        tree.rename(shared / "tree")
        shared.chmod(0o1777)
        os.chown(shared, owner, 0)
        done = run_hook(shared / "tree")
        assert done.returncode == status
        assert (f"{shared} belongs to uid {STRANGER}" in done.stderr) is bool(status)
        os.chown(shared, 0, 0)
        shared.chmod(0o777)
        assert f"chmod go-w {shared}" in run_hook(shared / "tree").stderr
    finally:
        (shared / "tree").rename(tree)
        shared.rmdir()


@needs_root
@pytest.mark.parametrize("mask", [0o000, 0o002])
def test_the_first_start_leaves_nothing_that_others_can_write(tree: Path, mask: int) -> None:
    for kept in list(tree.rglob("__pycache__")):
        shutil.rmtree(kept)
    for _ in range(2):
        done = subprocess.run([tree / "hooks" / HOOK.name, "-version"], capture_output=True, text=True, umask=mask)
        assert (done.returncode, done.stderr) == (0, "")
    kept = [path for folder in tree.rglob("__pycache__") for path in (folder, *folder.iterdir())]
    assert any(path.suffix == ".code" for path in kept)
    assert [path for path in kept if path.stat().st_mode & 0o022] == []


def plant(source: Path, text: str) -> None:
    """Python's compiled file of a source, of another text, that looks as if it were of this one."""
    compiled = Path(cache_from_source(str(source)))
    compiled.parent.mkdir(exist_ok=True)
    status = source.stat()
    head = MAGIC_NUMBER + struct.pack("<III", 0, int(status.st_mtime), status.st_size)
    compiled.write_bytes(head + marshal.dumps(compile(text, str(source), "exec")))


@needs_root
def test_python_s_own_compiled_files_are_not_believed(tree: Path) -> None:
    """Their time and size are all that Python looks at; trees that are unpacked with fixed times share those."""
    for kept in list(tree.rglob("__pycache__")):
        shutil.rmtree(kept)
    plant(tree / "nvct/oci/hook.py", "import posix; posix._exit(42)")
    first = f"import sys; sys.path.append({str(tree)!r}); import nvct.oci.hook"
    assert subprocess.run([PYTHON, "-I", "-S", "-B", "-c", first]).returncode == 42, "the trap does not work"
    done = run_hook(tree)
    assert (done.returncode, done.stderr) == (0, "")


@needs_root
def test_a_source_that_changed_within_its_size_and_time_is_read_again(tree: Path) -> None:
    hook = tree / "nvct/oci/hook.py"
    before, status = run_hook(tree).stdout, hook.stat()
    hook.write_text(hook.read_text().replace("NVIDIA Container Runtime Hook", "nvidia container runtime hook"))
    os.utime(hook, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hook.stat().st_size == status.st_size
    assert run_hook(tree).stdout == before.replace("NVIDIA Container Runtime Hook", "nvidia container runtime hook")


@needs_root
def test_compiled_files_of_a_stranger_are_refused_where_they_would_be_run(tree: Path) -> None:
    """Where nothing can be kept in the tree: another start that is at it will do for that."""
    run_hook(tree)
    for kept in tree.rglob("*.code"):
        kept.with_name(f"{kept.name}.new").touch()
        kept.unlink()
    compiled = Path(cache_from_source(str(tree / "nvct/oci/hook.py")))
    compiled.parent.mkdir(exist_ok=True)
    compiled.write_bytes(b"")
    os.chown(compiled, STRANGER, 0)
    done = run_hook(tree)
    assert done.returncode == 1
    assert f"chown root {compiled}" in done.stderr


def test_this_tree_itself_is_safe_for_who_runs_the_tests() -> None:
    assert why_code_is_unsafe(str(TREE)) == ""


@needs_root
def test_nothing_beside_the_package_stands_in_for_a_module_of_python(tree: Path) -> None:
    """The tree is searched last."""
    (tree / "_ctypes.py").write_text("import posix; posix._exit(42)\n")
    (tree / "fcntl.py").write_text("import posix; posix._exit(42)\n")
    first = f"import sys; sys.path.insert(0, {str(tree)!r}); import _ctypes"
    assert subprocess.run([PYTHON, "-I", "-S", "-c", first]).returncode == 42, "the trap does not work"
    done = run_hook(tree)
    assert (done.returncode, done.stderr) == (0, "")


@needs_root
def test_a_virtual_environment_of_a_stranger_is_not_run(tree: Path) -> None:
    packages = tree / ".venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (tree / ".venv/bin").mkdir()
    assert why_environment_is_unsafe(f"{tree}/.venv") == ""
    packages.chmod(0o777)
    assert f"chmod go-w {packages}" in why_environment_is_unsafe(f"{tree}/.venv")
    packages.chmod(0o755)
    os.chown(tree / ".venv/bin", STRANGER, 0)
    assert f"chown root {tree}/.venv/bin" in why_environment_is_unsafe(f"{tree}/.venv")


@needs_root
def test_settings_in_a_strangers_folder_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "folder/config.yaml"
    file.parent.mkdir(mode=0o755)
    file.write_text("cgroups: false\n")
    assert settings.load(str(file)).cgroups is False
    file.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=f"folder of the settings file.*chmod go-w {file.parent}"):
        settings.load(str(file))
    file.parent.chmod(0o755)
    os.chown(file.parent, STRANGER, 0)
    with pytest.raises(ConfigError, match=f"folder of the settings file.*chown root {file.parent}"):
        settings.load(str(file))


# What is done to the settings file, and what the hook says.
SETTINGS_HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "for all to write": (lambda path: path.chmod(0o666), "chmod go-w"),
    "for the group to write": (lambda path: path.chmod(0o664), "chmod go-w"),
    "of a stranger": (lambda path: os.chown(path, STRANGER, 0), "chown root"),
    "a link": (linked, "is a symbolic link; put the file itself there"),
}


@pytest.mark.engine
@pytest.mark.parametrize(("harm", "remedy"), SETTINGS_HARM.values(), ids=SETTINGS_HARM)
def test_the_hook_refuses_settings_of_a_stranger(
    own_dgx: SimNode, start: Start, harm: Callable[[Path], object], remedy: str
) -> None:
    """Also when they were good a moment ago, and are kept with the inventory."""
    env = {"NVIDIA_VISIBLE_DEVICES": "2"}
    with start(own_dgx, env):
        pass
    harm(own_dgx.config)
    with pytest.raises(StartFailed) as failure, start(own_dgx, env):
        pass
    assert str(own_dgx.config) in str(failure.value)
    assert remedy in str(failure.value)


# What is done to the kept inventory, after which it must not be believed.
INVENTORY_HARM: dict[str, Callable[[Path], object]] = {
    "for all to write": lambda path: path.chmod(0o666),
    "of a stranger": lambda path: os.chown(path, STRANGER, 0),
    "a link": linked,
    "no file": lambda path: (path.unlink(), os.mkfifo(path)),
}


@needs_root
@pytest.mark.parametrize("harm", INVENTORY_HARM.values(), ids=INVENTORY_HARM)
def test_an_inventory_of_a_stranger_is_not_believed(
    own_dgx: SimNode, start: Start, harm: Callable[[Path], object]
) -> None:
    with start(own_dgx, {"NVIDIA_VISIBLE_DEVICES": "2"}):
        pass
    assert cache.load(str(own_dgx.config)) is not None
    harm(own_dgx.cache)
    assert cache.load(str(own_dgx.config)) is None
    with start(own_dgx, {"NVIDIA_VISIBLE_DEVICES": "2"}):  # it is made anew, in the place of that one
        assert cache.load(str(own_dgx.config)) is not None
    own_dgx.cache.with_name("elsewhere").unlink(missing_ok=True)
