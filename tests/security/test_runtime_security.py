"""The runtime against its images and its surroundings: what it reads of an image, which hooks it leaves in specs."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvct.sim import bundle as bundles
from tests.security.test_environment import faults, hooks_in, hostile_env, set_traps
from tests.support.canary import Canary
from tests.support.cdi import generate
from tests.support.editing import Editing, editing
from tests.support.nodes import SimNode

DEVICES = "NVIDIA_VISIBLE_DEVICES"
UP = "../" * 20


def make_bundle(folder: Path, env: dict[str, str], stages: dict[str, list[dict[str, object]]] | None = None) -> Path:
    bundle = folder / "bundle"
    bundles.make_rootfs(bundle / "rootfs")
    bundles.write_config(bundle, bundles.config(["/usr/bin/true"], env, stages or {}))
    return bundle


MODES = ("auto", "spec", "hook", "cdi")


@pytest.mark.parametrize("mode", MODES)
def test_no_hook_of_ours_has_a_fault(dgx: SimNode, tmp_path: Path, mode: str) -> None:
    """Each has an env, and none runs in the container, whatever the container's own environment says."""
    specs = tmp_path / "cdi"
    specs.mkdir()
    generate(dgx, specs / "nvidia.yaml")
    bundle = make_bundle(tmp_path, {DEVICES: "2", "LD_PRELOAD": "/evil.so"})
    with editing(tmp_path / "settings", dgx, f"runtime_mode: {mode}\ncdi_spec_dirs: [{specs}]\n") as runtime:
        spec = runtime.edited(bundle)
    hooks = list(hooks_in(spec))
    assert [(stage, os.path.basename(str(hook["path"]))) for stage, hook in hooks] == [
        ("createRuntime", "nvidia-container-runtime-hook" if mode == "hook" else "nvct-cdi-hook")
    ]
    assert faults(spec) == []


def test_nothing_around_it_decides(dgx: SimNode, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    set_traps(evil)
    bundle = make_bundle(tmp_path, {DEVICES: "2"})
    with editing(tmp_path / "settings", dgx) as runtime:
        spec = runtime.edited(bundle, cwd=evil, env=hostile_env(evil))
    assert {entry["path"] for entry in spec["linux"]["devices"]} >= {"/dev/nvidiactl", "/dev/nvidia3"}
    assert len(spec["linux"]["devices"]) == 4


def test_code_that_others_can_change_is_not_run(dgx: SimNode, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    source = Path(__file__).resolve().parents[2]
    for room in ("hooks", "nvct"):
        shutil.copytree(source / room, tree / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "nvct/oci/runtime.py").chmod(0o666)
    bundle = make_bundle(tmp_path, {DEVICES: "2"})
    text = (bundle / "config.json").read_text()
    with editing(tmp_path / "settings", dgx) as runtime:
        runtime._command[0] = str(tree / "hooks/nvct-runtime")
        done = runtime.create(bundle)
    assert done.returncode == 1
    assert done.stderr.startswith("nvct: not run: ")
    assert "nvct/oci/runtime.py has mode 0666" in done.stderr
    assert (bundle / "config.json").read_text() == text


# What the runtime looks at in an image, the most where it wants to do without a hook.
LOOKED_AT = (
    "bin",
    "etc",
    "etc/debian_version",
    "etc/ld.so.cache",
    "lib",
    "lib64",
    "lib64/ld-linux-x86-64.so.2",
    "usr",
    "usr/bin/sh",
    "usr/lib",
    "usr/lib/ld-musl-x86_64.so.1",
    "etc/ld-musl-x86_64.path",
    "usr/local/cuda",
    "usr/local/cuda/compat",
    "usr/local/cuda/compat/libcuda.so.999.1",
)
Attack = Callable[[str, Canary], object]
ATTACKS: dict[str, Attack] = {
    "absolute link to a folder": lambda at, canary: os.symlink(f"{canary.path}/folder", at),
    "absolute link to a file": lambda at, canary: os.symlink(f"{canary.path}/file", at),
    "climbing link to a folder": lambda at, canary: os.symlink(f"{UP}{canary.path}/folder", at),
    "climbing link to a file": lambda at, canary: os.symlink(f"{UP}{canary.path}/file", at),
    "link into /proc/self/root": lambda at, canary: os.symlink(f"/proc/self/root{canary.path}/folder", at),
    "link to a descriptor": lambda at, _: os.symlink("/proc/self/fd/0", at),
    "link to itself": lambda at, _: os.symlink(os.path.basename(at), at),
    "fifo": lambda at, _: os.mkfifo(at),
    "device": lambda at, _: os.mknod(at, stat.S_IFCHR | 0o666, os.makedev(1, 5)),
    "large file": lambda at, _: (Path(at).touch(), os.truncate(at, 1 << 40)),
}


@pytest.fixture(scope="module")
def runtime(dgx: SimNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editing]:
    with editing(tmp_path_factory.mktemp("settings") / "own", dgx, "mask_proc: false\nruntime_hook: needed\n") as made:
        yield made


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_image_leads_it_nowhere(runtime: Editing, tmp_path: Path, attack: str) -> None:
    canary = Canary(tmp_path / "canary")
    bundle = make_bundle(tmp_path, {DEVICES: "2"})
    rootfs = bundle / "rootfs"
    sound = tmp_path / "sound"
    rootfs.rename(sound)
    for place in LOOKED_AT:
        shutil.copytree(sound, rootfs, symlinks=True)
        at = rootfs / place
        at.parent.mkdir(parents=True, exist_ok=True)
        if at.is_symlink() or at.is_file():
            at.unlink()
        elif at.exists():
            shutil.rmtree(at)
        ATTACKS[attack](str(at), canary)
        done = runtime.create(bundle, timeout=20)
        assert done.returncode == 0, (place, done.stderr)
        harm = canary.harm()
        # Mounts of other containers come and go meanwhile.
        assert [line for line in harm if not line.startswith("mount ") or str(tmp_path) in line] == [], place
        shutil.rmtree(rootfs)
    canary.close()
