"""The kept inventory: when it is fresh, whom it is believed, and how many starters discover."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_tree import TRIPLET, VERSION, NodeTree, capability, fake_nvml, information, write

from nvct import settings
from nvct.errors import ConfigError, DriverError
from nvct.model import Inventory, Roots
from nvct.node import cache, discover
from nvct.node.catalog import SOCKETS
from nvct.node.current import current, refresh
from nvct.node.devices import CONTROL_NODES
from nvct.record import replace


class Kept:
    """A node, its settings file, and an inventory kept for it."""

    def __init__(self, folder: Path, nvml: bytes = b"") -> None:
        self.tree = NodeTree(folder, nvml=nvml)
        write(self.tree.root / "etc/ld.so.cache", b"")
        self.run_dir = str(folder / "run")
        lines = (f"{name}: {getattr(self.tree.settings, name)}\n" for name in ("root", "dev_root", "proc_root"))
        self.config = str(write(folder / "config.yaml", "".join(lines) + f"device_table: {self.tree.table}\n"))
        self.settings = settings.load(self.config)
        self.inventory = Inventory(VERSION, "12.4", "x86_64", Roots(), {"nvidia": 195})

    @property
    def file(self) -> Path:
        return Path(cache.cache_path(self.config, self.run_dir))

    def store(self) -> None:
        cache.store(self.config, self.settings, self.inventory, cache.stamp(self.config, self.settings), self.run_dir)

    def load(self) -> object:
        return cache.load(self.config, self.run_dir)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    made = Kept(tmp_path)
    made.store()
    return made


def test_what_is_stored_is_loaded(kept: Kept) -> None:
    assert kept.load() == (kept.settings, kept.inventory)


def test_the_default_settings_file_has_the_plain_name() -> None:
    assert cache.cache_path("/etc/nvct/config.yaml", cache.RUN_DIR) == "/run/nvct/inventory.json"
    assert cache.cache_path("/srv/a.yaml", cache.RUN_DIR) == "/run/nvct/inventory-982ef555.json"


def test_nothing_is_kept_at_first(tmp_path: Path) -> None:
    assert Kept(tmp_path).load() is None


def test_the_file_is_readable_by_all_and_writable_by_its_owner(kept: Kept) -> None:
    assert kept.file.stat().st_mode & 0o7777 == 0o644
    assert kept.file.parent.stat().st_mode & 0o7777 == 0o755
    assert [path.name for path in kept.file.parent.iterdir()] == [kept.file.name]


def test_the_umask_does_not_hide_the_file(tmp_path: Path) -> None:
    made = Kept(tmp_path)
    before = os.umask(0o077)
    try:
        made.store()
    finally:
        os.umask(before)
    assert made.file.stat().st_mode & 0o7777 == 0o644
    assert made.file.parent.stat().st_mode & 0o7777 == 0o755


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def recreate_capability(kept: Kept) -> None:
    folder = kept.tree.proc / "driver/nvidia/capabilities/gpu0/mig/gi9"
    shutil.rmtree(folder)
    write(folder / "access", capability(84))
    write(folder / "ci0/access", capability(85))


CHANGES: dict[str, Callable[[Kept], object]] = {
    "another boot": lambda kept: write(kept.tree.proc / "sys/kernel/random/boot_id", "other\n"),
    "another driver": lambda kept: write(kept.tree.proc / "driver/nvidia/version", "NVRM version: x  460.56 y\n"),
    "no driver": lambda kept: shutil.rmtree(kept.tree.proc / "driver"),
    "one more GPU": lambda kept: write(
        kept.tree.proc / "driver/nvidia/gpus/0000:48:00.0/information", information("GPU-c", 2)
    ),
    "one GPU less": lambda kept: shutil.rmtree(kept.tree.proc / "driver/nvidia/gpus/0000:07:00.0"),
    "one more MIG device": lambda kept: write(
        kept.tree.proc / "driver/nvidia/capabilities/gpu1/mig/gi7/access", capability(9)
    ),
    "one MIG device less": lambda kept: shutil.rmtree(kept.tree.proc / "driver/nvidia/capabilities/gpu0/mig/gi9/ci0"),
    "a MIG device made again": recreate_capability,
    "another GPU in the same slot": lambda kept: rewrite(
        kept.tree.proc / "driver/nvidia/gpus/0000:07:00.0/information"
    ),
    "a module with another major": lambda kept: write(
        kept.tree.proc / "devices", "Character devices:\n195 nvidia\n234 nvidia-uvm\n"
    ),
    "another device table": lambda kept: rewrite(Path(kept.tree.table)),
    "a daemon's socket": lambda kept: write(kept.tree.root / "run/nvidia-persistenced/socket", ""),
    "another loader cache": lambda kept: rewrite(kept.tree.root / "etc/ld.so.cache"),
    "no loader cache": lambda kept: (kept.tree.root / "etc/ld.so.cache").unlink(),
    "settings written": lambda kept: rewrite(Path(kept.config)),
    "settings with another owner's mode": lambda kept: os.chmod(kept.config, 0o600),
    "no settings": lambda kept: os.unlink(kept.config),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_each_change_of_the_node_makes_it_stale(kept: Kept, change: str) -> None:
    time.sleep(0.01)  # the kernel's clock for files moves in steps of up to 10 ms
    CHANGES[change](kept)
    assert kept.load() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_a_node_that_is_made_later_makes_it_stale(kept: Kept) -> None:
    """nvidia-uvm's nodes are made when a program first needs them, long after the inventory."""
    write(Path(kept.config), Path(kept.config).read_text().replace(f"device_table: {kept.tree.table}\n", ""))
    kept.settings = settings.load(kept.config)
    kept.store()
    assert kept.load() is not None
    dev = Path(kept.settings.dev_root) / "dev"
    dev.mkdir(parents=True, exist_ok=True)
    os.mknod(dev / "nvidia-uvm", 0o020666, os.makedev(511, 0))
    assert kept.load() is None


def test_what_is_watched_is_what_discovery_looks_for() -> None:
    assert [control.path for control in CONTROL_NODES] == list(cache.CONTROL_NODES)
    assert [path for socket in SOCKETS for path in socket.paths] == list(cache.SOCKETS)


def test_an_inventory_of_other_settings_with_the_same_name_is_not_used(kept: Kept) -> None:
    content = json.loads(kept.file.read_text())
    content["stamp"]["settings_path"] = "/another/config.yaml"
    kept.file.write_text(json.dumps(content))
    assert kept.load() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"schema": 1}', '{"schema": 2}', "\x00\xff"])
def test_a_damaged_file_is_not_used(kept: Kept, text: str) -> None:
    kept.file.write_text(text)
    assert kept.load() is None


@pytest.mark.parametrize("part", ["schema", "settings", "inventory"])
def test_another_versions_file_is_not_used(kept: Kept, part: str) -> None:
    content = json.loads(kept.file.read_text())
    content[part] = 2 if part == "schema" else {**content[part], "news": 1, "schema": 2}
    kept.file.write_text(json.dumps(content))
    assert kept.load() is None


def test_a_file_that_others_can_write_is_not_used(kept: Kept) -> None:
    for mode in (0o664, 0o646):
        kept.file.chmod(mode)
        assert kept.load() is None
    kept.file.chmod(0o600)
    assert kept.load() is not None


def test_a_folder_that_others_can_write_is_not_used(kept: Kept) -> None:
    kept.file.parent.chmod(0o775)
    assert kept.load() is None
    with pytest.raises(ConfigError, match=r"mode 0775.*chmod"):
        kept.store()


def test_a_link_is_not_followed(kept: Kept) -> None:
    real = kept.file.with_name("real.json")
    kept.file.rename(real)
    kept.file.symlink_to(real)
    assert kept.load() is None


def test_a_linked_folder_is_not_followed(kept: Kept) -> None:
    real = kept.file.parent.with_name("real")
    kept.file.parent.rename(real)
    kept.file.parent.symlink_to(real)
    assert kept.load() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_strangers_file_or_folder_is_not_used(kept: Kept) -> None:
    os.chown(kept.file, 1000, 1000)
    assert kept.load() is None
    os.chown(kept.file, 0, 0)
    assert kept.load() is not None
    os.chown(kept.file.parent, 1000, 1000)
    assert kept.load() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="root's file is the point")
def test_an_ordinary_user_reads_roots_inventory(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    made = Kept(tmp_path)
    made.store()
    child = os.fork()
    if not child:
        os.setresuid(65534, 65534, 65534)
        os._exit(0 if made.load() == (made.settings, made.inventory) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_pipe_does_not_block(kept: Kept) -> None:
    kept.file.unlink()
    os.mkfifo(kept.file)
    assert kept.load() is None


def test_a_folder_is_not_used(kept: Kept) -> None:
    kept.file.unlink()
    kept.file.mkdir()
    assert kept.load() is None


def test_a_deep_file_is_not_used(kept: Kept) -> None:
    kept.file.write_text("[" * 1_000_000)
    assert kept.load() is None


def test_a_file_of_endless_size_is_not_read(kept: Kept) -> None:
    os.truncate(kept.file, 1 << 40)
    assert kept.load() is None


def places_in(value: object) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places_in(inner)


@pytest.mark.parametrize("wrong", [None, 7, "x", [], {}, [7], {"x": 7}, 10**40, True], ids=repr)
def test_a_file_with_anything_in_a_wrong_place_raises_nothing(kept: Kept, wrong: object) -> None:
    """In the stamp it makes the file stale; nobody but root can have written one with a wrong value elsewhere."""
    content = json.loads(kept.file.read_text())
    for holder, key in list(places_in(content)):
        old, holder[key] = holder[key], wrong
        kept.file.write_text(json.dumps(content))
        found = kept.load()
        if old != wrong and (holder is content or holder is content["stamp"]):
            assert found is None, key
        holder[key] = old


def test_what_killed_writers_left_is_removed(kept: Kept) -> None:
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    for pid in (dead, os.getppid()):
        write(kept.file.with_name(f".{kept.file.name}.{pid}"), "half an inven")
    kept.store()
    assert {path.name for path in kept.file.parent.iterdir()} == {kept.file.name, f".{kept.file.name}.{os.getppid()}"}


def test_a_lock_that_the_file_system_refuses_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache, "flock", refuse)
    with cache.Lock(str(tmp_path / "run")):
        pass


def test_a_failed_store_leaves_the_old_file_and_no_other(kept: Kept) -> None:
    kept.inventory = replace(kept.inventory, missing=(object(),))
    with pytest.raises(TypeError):
        kept.store()
    assert [path.name for path in kept.file.parent.iterdir()] == [kept.file.name]
    assert kept.load() is not None


def test_a_held_lock_is_waited_for_no_longer_than_the_limit(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    with cache.Lock(run_dir):
        started = time.monotonic()
        with cache.Lock(run_dir, limit_s=0.2):
            waited = time.monotonic() - started
    assert 0.2 <= waited < 2


def test_the_lock_is_exclusive_and_is_freed(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    with cache.Lock(run_dir), open(f"{run_dir}/lock") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(f"{run_dir}/lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert os.stat(f"{run_dir}/lock").st_mode & 0o777 == 0o600


def test_a_holder_that_dies_frees_the_lock(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    child = os.fork()
    if not child:
        cache.Lock(run_dir).__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    started = time.monotonic()
    with cache.Lock(run_dir):
        assert time.monotonic() - started < 5


def test_where_no_lock_can_be_the_work_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "run", "a file is in the way")
    with cache.Lock(str(tmp_path / "run")):
        pass


def initialisations(counter: Path) -> int:
    return len(counter.read_bytes())


def counted(folder: Path) -> tuple[Kept, Path]:
    """A node whose NVML counts its initialisations and takes a moment for each."""
    counter = folder / "counter"
    return Kept(folder, fake_nvml(f'-DCOUNTER="{counter}"')), counter


def test_a_stale_inventory_is_discovered_and_kept(tmp_path: Path) -> None:
    kept, counter = counted(tmp_path)
    first = current(kept.config, kept.run_dir)
    assert first.warnings == ()
    assert len(first.inventory.gpus) == 2
    assert current(kept.config, kept.run_dir) == first
    assert initialisations(counter) == 1
    write(kept.tree.proc / "sys/kernel/random/boot_id", "next boot\n")
    assert current(kept.config, kept.run_dir) == first
    assert initialisations(counter) == 2


def test_refresh_discovers_whatever_is_kept(tmp_path: Path) -> None:
    kept, counter = counted(tmp_path)
    refresh(kept.config, kept.run_dir)
    refresh(kept.config, kept.run_dir)
    assert initialisations(counter) == 2
    assert kept.load() is not None


def test_a_hundred_starters_initialise_nvml_once(tmp_path: Path) -> None:
    kept, counter = counted(tmp_path)
    children = []
    for _ in range(100):
        child = os.fork()
        if not child:
            try:
                found = current(kept.config, kept.run_dir)
                os._exit(0 if len(found.inventory.gpus) == 2 else 1)
            finally:
                os._exit(2)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 100
    assert initialisations(counter) == 1


def test_a_node_without_a_place_to_keep_it_gets_a_warning(tmp_path: Path) -> None:
    kept, _ = counted(tmp_path)
    write(Path(kept.run_dir), "a file is in the way")
    found = current(kept.config, kept.run_dir)
    assert len(found.inventory.gpus) == 2
    assert "cannot be kept" in found.warnings[0]
    assert kept.run_dir in found.warnings[0]


def test_without_a_driver_nothing_is_kept(tmp_path: Path) -> None:
    kept, _ = counted(tmp_path)
    shutil.rmtree(kept.tree.proc / "driver")
    with pytest.raises(DriverError, match="no NVIDIA driver"):
        current(kept.config, kept.run_dir)
    assert not kept.file.exists()


def test_settings_that_change_while_they_are_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, _ = counted(tmp_path)
    load = settings.load

    def load_and_change(path: str) -> settings.Settings:
        loaded = load(path)
        write(Path(path), Path(path).read_text() + "cgroups: false\n")
        return loaded

    monkeypatch.setattr(settings, "load", load_and_change)
    assert current(kept.config, kept.run_dir).settings.cgroups
    monkeypatch.undo()
    assert not current(kept.config, kept.run_dir).settings.cgroups


def test_a_change_during_discovery_makes_it_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = counted(tmp_path)

    def discover_and_change(chosen: settings.Settings) -> Inventory:
        found = original(chosen)
        shutil.rmtree(kept.tree.proc / "driver/nvidia/capabilities/gpu0/mig/gi9")
        return found

    original = discover.discover
    monkeypatch.setattr(discover, "discover", discover_and_change)
    assert len(current(kept.config, kept.run_dir).inventory.gpus[1].mig_devices) == 2
    monkeypatch.undo()
    assert kept.load() is None


def test_libraries_are_those_of_the_settings_root(tmp_path: Path) -> None:
    kept, _ = counted(tmp_path)
    files = current(kept.config, kept.run_dir).inventory.files
    assert files[0].path == f"{TRIPLET}/libnvidia-ml.so.{VERSION}"


def test_callers_who_are_not_root_read_roots_inventory(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own comes first."""
    own = Path(kept.run_dir).parent / "own"
    monkeypatch.setattr(cache, "RUN_DIR", kept.run_dir)
    monkeypatch.setattr(cache, "own_run_dir", lambda: str(own))
    assert cache.load(kept.config) == (kept.settings, kept.inventory)
    other = replace(kept.inventory, cuda_version="99.9")
    cache.store(kept.config, kept.settings, other, cache.stamp(kept.config, kept.settings))
    assert cache.load(kept.config) == (kept.settings, other)
    write(Path(kept.config), Path(kept.config).read_text())
    kept.store()
    assert cache.load(kept.config) == (kept.settings, kept.inventory)
