"""CDI specs of simulated nodes, and what containers that are started from one must show."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from nvct.sim import bundle as bundles
from tests.support.expect import FOLDERS, PROFILE, READ_ONLY, wanted
from tests.support.nodes import SimNode
from tests.support.runc import TREE

KIND = "nvidia.com/gpu"
CAPABILITIES = ("compute", "utility", "video", "compat32", "ngx", "graphics", "display")


def generate(node: SimNode, output: Path, *options: str) -> Path:
    """Have the command line write the node's spec."""
    nvct_on(node, "cdi", "generate", "--output", str(output), *options)
    return output


def nvct_on(node: SimNode, *words: str) -> str:
    command = [sys.executable, "-I", str(TREE / "nvct/__main__.py"), "--config", str(node.config), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def hooked(
    node: SimNode, devices: Sequence[str], family: str = "debian", without: Collection[str] = ()
) -> dict[str, Any]:
    """What `expect.seen` must show of a container from a spec with the hook: that of the prestart hook with every
    capability, but that an engine makes device nodes where that hook mounts them.

    The image is not known to a spec, so that libraries lie where a Debian has them; in other images there are links at
    the places where drivers of GBM and VDPAU are looked for. `without`: stems of libraries that the node lacks.
    """
    expected = wanted(node, devices, CAPABILITIES, "debian", without)
    if not devices:
        expected["written"].remove(PROFILE)  # which names the GPUs
    expected["mounts"] = {path: how for path, how in expected["mounts"].items() if path not in expected["nodes"]}
    if family == "lib64":
        for usual, own in zip(FOLDERS["debian"], FOLDERS["lib64"]):
            below = [path for path in expected["links"] if path.startswith((f"{usual}/gbm/", f"{usual}/vdpau/"))]
            below += [path for path in expected["links"] if path.startswith(f"{usual}/nvidia/")]
            expected["links"] |= {own + path.removeprefix(usual): path for path in below}
        expected["sees"] = wanted(node, devices, CAPABILITIES, "lib64")["sees"]
    return expected


def hook_free(node: SimNode, devices: Sequence[str]) -> dict[str, Any]:
    """The same of a spec without the hook: every name of a library is a mount, in the folders of both families."""
    expected = hooked(node, devices)
    wide, narrow = FOLDERS["debian"]
    twin = FOLDERS["lib64"][0]
    names = [path for path in (*expected["names"].values(), *expected["links"]) if path.startswith((wide, narrow))]
    libraries = set(names) - {path for path in names if "/xorg/" in path}
    mounts = {
        path: how
        for path, how in expected["mounts"].items()
        if not path.startswith((f"{wide}/lib", f"{narrow}/lib", f"{wide}/vdpau/", f"{narrow}/vdpau/", "/proc/"))
    }
    mounts |= dict.fromkeys(names, READ_ONLY)
    mounts |= {twin + path.removeprefix(wide): READ_ONLY for path in libraries if path.startswith(wide)}
    return expected | {"mounts": mounts, "links": {}, "names": {}, "written": set(), "proc": set(), "strangers": set()}


def hook_free_sources(node: SimNode) -> dict[str, str]:
    """By place in the container, the node's file: every name shows the library that it leads to with a hook."""
    expected = hooked(node, [])
    wide, twin = FOLDERS["debian"][0], FOLDERS["lib64"][0]
    sources = {}
    for path in (*expected["names"].values(), *expected["links"]):
        end = path
        while end in expected["links"]:
            end = os.path.normpath(f"{os.path.dirname(end)}/{expected['links'][end]}")
        sources[path] = end
        if path.startswith(wide):
            sources[twin + path.removeprefix(wide)] = end
    return sources


def make_red_hat_root(rootfs: Path) -> None:
    """A root with libraries in /usr/lib64 and a loader that looks there and in /lib64, as Red Hat builds it; no cache.

    This machine's loader has the folders of Debian compiled in: they are written over with others of the same length,
    the rest of which are slashes.
    """
    bundles.make_rootfs(rootfs, "lib64", loader_cache=False)
    wide = FOLDERS["debian"][0]
    libraries = rootfs / wide[1:]
    for library in libraries.iterdir():
        shutil.move(library, rootfs / "usr/lib64" / library.name)
    libraries.rmdir()
    loader = rootfs / "lib64/ld-linux-x86-64.so.2"
    content = loader.read_bytes()
    for usual, own in ((f"{wide}/", "/usr/lib64/"), (f"{wide.removeprefix('/usr')}/", "/lib64/")):
        old = b"\0" + usual.encode() + b"\0"
        assert old in content
        content = content.replace(old, b"\0" + own.ljust(len(usual), "/").encode() + b"\0")
    loader.write_bytes(content)
