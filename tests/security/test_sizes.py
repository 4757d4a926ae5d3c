"""Numbers and sizes that nobody needs, in the real hook: bounded time and memory, one clear line, no traceback.

The bounds stand in docs/security.md: 512 MiB of address space and 10 s of CPU suffice whatever the container brings.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from nvct import ldcache, ldmerge
from nvct.inject import links, loader
from nvct.node.cache import cache_path
from nvct.node.current import current
from nvct.sim.bundle import config
from tests.support.bare import BareContainer
from tests.support.nodes import SimNode
from tests.support.runc import HOOK

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root"),
]

MOST_MEMORY = 512 << 20  # bytes of address space (RLIMIT_AS)
MOST_TIME = 10  # seconds of CPU (RLIMIT_CPU)

ENV = {"NVIDIA_VISIBLE_DEVICES": "2", "NVIDIA_DRIVER_CAPABILITIES": "utility"}


class Done(NamedTuple):
    status: int
    error: str


def run_hook(node: Ready, state: bytes, memory: int = MOST_MEMORY) -> Done:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_TIME, MOST_TIME))

    command = [HOOK, "--config", node.config, "prestart"]
    done = subprocess.run(command, input=state, capture_output=True, preexec_fn=limit, timeout=60)
    return Done(done.returncode, done.stderr.decode())


def check_refused(done: Done, reason: str) -> None:
    """One line that gives the reason. A process that is killed at its limits has a negative status."""
    assert done.status == 1, done
    assert "Traceback" not in done.error
    (line,) = done.error.splitlines()
    assert line.startswith("nvct: ")
    assert reason in line


class Ready(NamedTuple):
    """A node with a fresh inventory: to discover it takes a process of its own that no container concerns."""

    config: Path
    proc_driver: Path


@pytest.fixture(scope="module")
def ready(dgx: SimNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    # The container's process here has no cgroup of its own, so that there are no rules to write.
    settings = tmp_path_factory.mktemp("settings") / "config.yaml"
    settings.write_text(dgx.config.read_text() + "cgroups: false\n")
    current(str(settings))
    yield Ready(settings, dgx.path / "proc/driver")
    Path(cache_path(str(settings))).unlink(missing_ok=True)


@pytest.fixture
def container(ready: Ready, tmp_path: Path) -> Iterator[BareContainer]:
    for folder in ("etc", "usr/bin", "usr/lib64", "run", "lib/firmware"):
        (tmp_path / "rootfs" / folder).mkdir(parents=True)
    with BareContainer(tmp_path / "rootfs", ready.proc_driver) as container:
        yield container


def bundle(container: BareContainer, text: bytes) -> bytes:
    """The OCI state of the container with this text for a config.json."""
    folder = container.rootfs.parent
    (folder / "config.json").write_bytes(text)
    return json.dumps({"pid": container.pid, "bundle": str(folder)}).encode()


def spec_with(**parts: str) -> bytes:
    """A config.json with parts of JSON in the place of usual ones."""
    usual = {"ociVersion": '"1.0.2"', "process": '{"env": ["NVIDIA_VISIBLE_DEVICES=2"]}', "root": '{"path": "rootfs"}'}
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in {**usual, **parts}.items()) + "}").encode()


def env_of(count: int) -> str:
    return '{"env": [' + '"A=1",' * count + '"NVIDIA_VISIBLE_DEVICES=none-of-ours"]}'


DEEP = 100_000

# Without such a word the hook's front lets a container start, whatever else its config.json holds.
WORD = '"NVIDIA_"'

SPECS: dict[str, tuple[Callable[[], bytes], str]] = {
    "200 MB": (lambda: spec_with(annotations='"' + "x" * 200_000_000 + '"'), "is longer than 16777216 bytes"),
    "a million env entries": (lambda: spec_with(process=env_of(1_000_000)), "none-of-ours"),
    "lists in lists": (lambda: spec_with(process="[" * DEEP + "]" * DEEP, hostname=WORD), "is not JSON"),
    "objects in objects": (
        lambda: spec_with(process='{"a":' * DEEP + "1" + "}" * DEEP, hostname=WORD),
        "is not JSON",
    ),
    "a number of a million digits": (lambda: spec_with(linux="1" * 1_000_000), "is not JSON"),
    "cut short": (lambda: spec_with()[:-1], "is not JSON"),
    "no UTF-8": (lambda: spec_with(hostname='"\xff"').decode().encode("latin-1"), "is not JSON"),
    "half a surrogate pair in the root": (lambda: spec_with(root='{"path": "\\ud800"}'), "is no path"),
    "NUL in the root": (lambda: spec_with(root='{"path": "a\\u0000b"}'), "is no path"),
    "a root of 5000 bytes": (lambda: spec_with(root=json.dumps({"path": "x" * 5000})), "File name too long"),
    "half a surrogate pair in the request": (
        lambda: spec_with(process='{"env": ["NVIDIA_VISIBLE_DEVICES=\\ud800"]}'),
        "\\ud800",
    ),
    "lines in the request": (
        lambda: spec_with(process='{"env": ["NVIDIA_VISIBLE_DEVICES=2\\nnvct: all is well"]}'),
        "2\\nnvct",
    ),
    "a request of a million tokens": (
        lambda: spec_with(process='{"env": ["NVIDIA_VISIBLE_DEVICES=' + "0:0," * 1_000_000 + 'x"]}'),
        "has 4000001 characters, expected at most 131072",
    ),
    "a request of one huge token": (
        lambda: spec_with(process='{"env": ["NVIDIA_VISIBLE_DEVICES=' + "9" * 1_000_000 + '"]}'),
        "NVIDIA_VISIBLE_DEVICES",
    ),
    "a huge capability": (
        lambda: spec_with(
            process='{"env": ["NVIDIA_VISIBLE_DEVICES=2", "NVIDIA_DRIVER_CAPABILITIES=' + "x" * 1_000_000 + '"]}'
        ),
        "NVIDIA_DRIVER_CAPABILITIES",
    ),
}


@pytest.mark.parametrize(("text", "reason"), SPECS.values(), ids=SPECS)
def test_a_config_json(ready: Ready, container: BareContainer, text: Callable[[], bytes], reason: str) -> None:
    before = container.tree(), container.mounts()
    done = run_hook(ready, bundle(container, text()))
    check_refused(done, reason)
    assert len(done.error) < 10_000
    assert (container.tree(), container.mounts()) == before


def test_a_million_variables_that_ask_for_nothing(ready: Ready, container: BareContainer) -> None:
    text = spec_with(process='{"env": [' + '"A=1",' * 1_000_000 + '"B=2"]}')
    assert run_hook(ready, bundle(container, text)) == Done(0, "")


def test_what_takes_most_memory_for_its_size(ready: Ready, container: BareContainer) -> None:
    """16 MB of empty lists are 370 MB of Python: within the bound, and told in a line where there is less."""
    state = bundle(container, spec_with(linux="[" + "[]," * 5_500_000 + "1]"))
    assert run_hook(ready, state) == Done(0, "")
    check_refused(run_hook(ready, state, memory=200 << 20), "needs more memory than the hook has")


STATES = {
    "2 MB": (b'{"pid": 1, "bundle": "/' + b"x" * (2 << 20) + b'"}', "is longer than 1048576 bytes"),
    "nested": (b"[" * DEEP, "is not JSON"),
    "empty": (b"", "is not JSON"),
    "a list": (b"[]", "is not a JSON object"),
    "a negative process": (b'{"pid": -1, "bundle": "/"}', "has pid -1"),
    "no number": (b'{"pid": true, "bundle": "/"}', "has pid True"),
    "more than any process": (b'{"pid": 99999999999999999999, "bundle": "/"}', "has pid 99999999999999999999"),
    "a bundle that is not": (b'{"pid": 1, "bundle": "/nowhere"}', "/nowhere/config.json"),
    "NUL in the bundle": (b'{"pid": 1, "bundle": "/\\u0000"}', "config.json"),
}


@pytest.mark.parametrize(("state", "reason"), STATES.values(), ids=STATES)
def test_a_state(ready: Ready, state: bytes, reason: str) -> None:
    check_refused(run_hook(ready, state), reason)


LARGE = {
    "a long string before all": lambda state: json.dumps({"annotations": {"a": "x" * 900_000}, **state}),
    "many strings before all": lambda state: json.dumps({**{f"k{number}": "v" for number in range(60_000)}, **state}),
    "many lines": lambda state: json.dumps({**state, "annotations": {str(n): "" for n in range(60_000)}}, indent=0),
}


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
def test_a_large_state(
    ready: Ready, container: BareContainer, large: Callable[[dict[str, object]], str], asks: bool
) -> None:
    """Each within the hook's bounds of time; the shell's own means can take the square of it."""
    state = json.loads(bundle(container, json.dumps(config(["true"], ENV if asks else {}, {})).encode()))
    assert run_hook(ready, large(state).encode()) == Done(0, "")


# What the image holds: in a mount namespace, where the hook carries out all it does.


def start(node: Ready, container: BareContainer, memory: int = MOST_MEMORY) -> Done:
    return run_hook(node, bundle(container, json.dumps(config(["true"], ENV, {})).encode()), memory)


def cache_of(entries: int, name: Callable[[int], str], path: Callable[[int], str]) -> bytes:
    return ldmerge.merge(None, [(name(n), path(n), 0x0303) for n in range(entries)])


def header(entries: int, size: int, rest: bytes = b"") -> bytes:
    return b"glibc-ld.so.cache1.1" + struct.pack("<2IB3xI12x", entries, size, 2, 0) + rest


def entry(name: int, path: int) -> bytes:
    """An entry of offsets; the first string of a cache with one entry is at 72."""
    return struct.pack("<IIIIQ", 0x0303, name, path, 0, 0)


CACHES: dict[str, tuple[Callable[[], bytes], str]] = {
    "garbage": (lambda: os.urandom(1 << 20), "loader cache: begins with"),
    "zeros": (lambda: bytes(1 << 20), "loader cache: begins with"),
    "4 GB of entries": (lambda: header(0xFFFFFFFF, 0), "claims 4294967295 entries"),
    "4 GB of strings": (lambda: header(0, 0xFFFFFFFF), "claims 4294967295 bytes of strings"),
    "offsets outside": (lambda: header(1, 4, entry(72, 0xFFFFFFF0) + b"a\0b\0"), "string offsets"),
    "offsets into the header": (lambda: header(1, 4, entry(0, 72) + b"a\0b\0"), "string offsets"),
    "a string without end": (lambda: header(1, 5000, entry(72, 72) + b"x" * 5000), "has no end"),
    "too many entries": (lambda: header(200_001, 0, bytes(24 * 200_001)), "200001 entries, more than"),
    "too many files of a driver": (
        lambda: cache_of(5000, lambda n: f"libnvidia-{n}.so", lambda n: f"/usr/lib64/libnvidia-{n}.so"),
        f"more than {loader.MOST_LOOKS} files of drivers",
    ),
}


@pytest.mark.parametrize(("content", "reason"), CACHES.values(), ids=CACHES)
def test_a_loader_cache_that_is_refused(
    ready: Ready, container: BareContainer, content: Callable[[], bytes], reason: str
) -> None:
    (container.rootfs / "etc/ld.so.cache").write_bytes(content())
    before = container.tree(), container.mounts()
    check_refused(start(ready, container), reason)
    assert (container.tree(), container.mounts()) == before


def test_a_loader_cache_beyond_all_bounds(ready: Ready, container: BareContainer) -> None:
    with (container.rootfs / "etc/ld.so.cache").open("wb") as stream:
        stream.write(header(1, 1))
        stream.truncate(4 << 30)
    check_refused(start(ready, container), "EFBIG")


TAKEN: dict[str, Callable[[], bytes]] = {
    "100,000 entries": lambda: cache_of(100_000, lambda n: f"lib{n}.so", lambda n: f"/usr/lib64/lib{n}.so"),
    "strings that overlap": lambda: header(1000, 24, entry(24_048, 24_048) * 1000 + b"libfoo.so\0".ljust(24, b"\0")),
}


@pytest.mark.parametrize("content", TAKEN.values(), ids=TAKEN)
def test_a_loader_cache_that_is_large_and_good(
    ready: Ready, container: BareContainer, content: Callable[[], bytes]
) -> None:
    file = container.rootfs / "etc/ld.so.cache"
    data = content()
    file.write_bytes(data)
    old = {(entry.name, entry.path) for entry in ldcache.parse(data).entries}
    assert start(ready, container) == Done(0, "")
    new = {(entry.name, entry.path) for entry in ldcache.parse(file.read_bytes()).entries}
    assert old <= new
    assert "libnvidia-ml.so.1" in {name for name, _ in new - old}


def test_memory_that_runs_out_half_way_undoes_all(ready: Ready, container: BareContainer) -> None:
    """A cache of 60 MB is within the bounds, but not within 150 MB of memory."""
    (container.rootfs / "etc/ld.so.cache").write_bytes(header(0, 60 << 20, bytes(60 << 20)))
    before = container.tree(), container.mounts()
    check_refused(start(ready, container, memory=150 << 20), "write the loader cache: MemoryError")
    assert (container.tree(), container.mounts()) == before
    assert start(ready, container) == Done(0, "")


# Links that take the kernel long to follow: each of forty has two thousand steps.


def slow_way(folder: Path) -> None:
    for number in range(39):
        (folder / f"way{number}").symlink_to("./" * 2030 + f"way{number + 1}")
    (folder / "way39").symlink_to("nowhere")


def test_many_links_that_are_slow_to_follow(ready: Ready, container: BareContainer) -> None:
    libraries = container.rootfs / "usr/lib64"
    slow_way(libraries)
    for number in range(links.MOST_CANDIDATES // 2):
        (libraries / f"libnvidia-{number}.so").symlink_to("way0")
    began = time.monotonic()
    assert start(ready, container) == Done(0, "")
    assert time.monotonic() - began < MOST_TIME
    # Linux does not follow so long a way, and what is behind it may well be there: such a link is nobody's leftover.
    assert all((libraries / f"libnvidia-{number}.so").is_symlink() for number in range(10))


def test_more_leftovers_than_any_driver_leaves(ready: Ready, container: BareContainer) -> None:
    libraries = container.rootfs / "usr/lib64"
    for number in range(links.MOST_CANDIDATES + 10):
        (libraries / f"libnvidia-{number}.so").symlink_to("nothing")
    check_refused(start(ready, container), f"{links.MOST_CANDIDATES} that could be of a driver")
    assert (libraries / "libnvidia-0.so").is_symlink()


def test_a_loader_cache_whose_paths_are_slow_to_follow(ready: Ready, container: BareContainer) -> None:
    slow_way(container.rootfs / "usr/lib64")
    several = cache_of(1000, lambda n: f"libnvidia-{n}.so", lambda n: "/usr/lib64/way0" + "/" * n)
    (container.rootfs / "etc/ld.so.cache").write_bytes(several)
    began = time.monotonic()
    assert start(ready, container) == Done(0, "")
    assert time.monotonic() - began < MOST_TIME
