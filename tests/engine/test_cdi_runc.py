"""CDI specs in real runc containers, applied by an engine's stand-in: the same containers as those of the prestart
hook.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from nvct.sim.node import spec_from_profile
from tests.engine.test_runc_requests import MIXED_REQUESTS, REQUESTS
from tests.support.cdi import KIND, generate, hook_free, hook_free_sources, hooked, make_red_hat_root
from tests.support.cdi_applier import apply_cdi
from tests.support.expect import FOLDERS, rules_v1, seen
from tests.support.nodes import SimNode
from tests.support.runc import RuncContainer, StartFailed, kernel_hook, make_root, runc_container
from tests.support.trees import read_tree

pytestmark = pytest.mark.engine

StartCdi = Callable[..., AbstractContextManager[RuncContainer]]


@pytest.fixture(scope="module")
def specs(dgx: SimNode, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("specs")
    return {
        "hooked": generate(dgx, folder / "hooked.yaml"),
        "hook-free": generate(dgx, folder / "free.json", "--no-hooks"),
    }


@pytest.fixture
def start_cdi(runc: None, static_programs: Path, tmp_path: Path) -> StartCdi:
    """`with start_cdi(node, spec file, "0", "1:0", ...) as container:` with options of `runc_container`."""

    def start(node: SimNode, spec: Path, *devices: str, **options: Any) -> AbstractContextManager[RuncContainer]:
        names = [f"{KIND}={device}" for device in devices]
        return runc_container(
            tmp_path,
            node.path,
            {},
            programs=static_programs,
            hooks=[kernel_hook(node.path)],
            change=lambda config: apply_cdi(config, [spec], names),
            **options,
        )

    return start


def cdi_names(value: str, node: SimNode) -> list[str] | None:
    """The tokens of a variable as CDI names; None where one of them is no name of CDI's."""
    tokens = [token.strip().removeprefix(f"{KIND}=") for token in value.split(",") if token.strip()]
    facts = (*node.gpus.values(), *node.mig.values())
    known = {"all", "none", *node.gpus, *node.mig, *(fact.uuid for fact in facts)}
    return list(dict.fromkeys(tokens)) if known.issuperset(tokens) else None


# In a variable `none` outweighs what follows it; CDI devices add up.
FORMS = {name: form for name, form in REQUESTS.items() if name != "none-first"}


@pytest.mark.parametrize("kind", ["hooked", "hook-free"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_request_gives_the_container_of_the_prestart_hook(
    dgx: SimNode, specs: dict[str, Path], start_cdi: StartCdi, form: str, kind: str
) -> None:
    value, devices = FORMS[form]
    names = cdi_names(value, dgx)
    if names is None:
        with pytest.raises(KeyError):
            apply_cdi({"process": {}}, [specs[kind]], [f"{KIND}={token}" for token in value.split(",")])
        return
    with start_cdi(dgx, specs[kind], *names) as container:
        expected = hooked(dgx, devices) if kind == "hooked" else hook_free(dgx, devices)
        assert seen(container, dgx, hook_free_sources(dgx) if kind == "hook-free" else None) == expected
        assert container.devices_v1() == rules_v1(expected["nodes"])


# What is no name of a CDI device is left out: beginnings of UUIDs, PCI addresses, the UUIDs of drivers before 470.
MIXED_FORMS = {
    name: form for name, form in MIXED_REQUESTS.items() if not name.startswith(("prefix", "bus-id", "old-uuid"))
}


@pytest.mark.parametrize("form", MIXED_FORMS)
def test_a_mixed_node_of_an_older_driver(mixed: SimNode, start_cdi: StartCdi, tmp_path: Path, form: str) -> None:
    value, devices = MIXED_FORMS[form]
    spec = generate(mixed, tmp_path / "spec.yaml")
    with start_cdi(mixed, spec, *value.split(",")) as container:
        assert seen(container, mixed) == hooked(mixed, devices, without=["libnvidia-encode"])


@pytest.mark.parametrize("kind", ["hooked", "hook-free"])
def test_device_rules_of_both_cgroup_versions(
    dgx: SimNode, specs: dict[str, Path], start_cdi: StartCdi, cgroups: list[str], kind: str
) -> None:
    with start_cdi(dgx, specs[kind], "0:1", "5", prefix=cgroups) as container:
        said = container.look(dgx.device_numbers())
    expected = hooked(dgx, ["0:1", "5"])
    assert said.opens == expected["opens"]
    assert said.uuids == expected["sees"]


def test_an_image_with_lib64(dgx: SimNode, specs: dict[str, Path], start_cdi: StartCdi) -> None:
    with start_cdi(dgx, specs["hooked"], "1:2", family="lib64") as container:
        container.family = "debian"  # where a spec has the libraries
        assert seen(container, dgx) == hooked(dgx, ["1:2"], "lib64")


def library_names(node: SimNode) -> list[str]:
    """The 64-bit names by which programs ask for the driver's libraries."""
    return sorted(name for name, bits in hooked(node, [])["names"] if bits == 64)


# Only VDPAU itself looks for this one, in a folder that no loader knows.
NOT_FOR_LOADERS = ("libvdpau_nvidia.so.1",)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="Red Hat's loader is made out of this machine's x86-64 one")
@pytest.mark.parametrize(("kind", "family"), [("hooked", "lib64"), ("hook-free", "lib64"), ("hook-free", "debian")])
def test_every_library_is_found_by_a_real_loader(
    dgx: SimNode,
    specs: dict[str, Path],
    start_cdi: StartCdi,
    tmp_path: Path,
    dlopen_all: Path,
    kind: str,
    family: str,
) -> None:
    rootfs = tmp_path / "rootfs"
    if family == "lib64":
        make_red_hat_root(rootfs)
    else:
        make_root(rootfs, family, False, None)
    shutil.copy(dlopen_all, rootfs / "usr/bin")
    names = [name for name in library_names(dgx) if kind == "hooked" or name not in NOT_FOR_LOADERS]
    with start_cdi(dgx, specs[kind], "3", rootfs=rootfs) as container:
        done = container.run("/usr/bin/dlopen_all", *names, check=False)
        listed = container.sh("nvidia-smi -L")
    # /lib is a link to usr/lib in these images.
    rows = [line.partition("\t") for line in done.stdout.splitlines()]
    found = {
        name: os.path.normpath(os.path.dirname(f"/usr{path}" if path.startswith("/lib/") else path))
        for name, _, path in rows
    }
    own = "/usr/lib64" if family == "lib64" and kind == "hook-free" else FOLDERS["debian"][0]
    assert found == {name: f"{own}/vdpau" if name in NOT_FOR_LOADERS else own for name in names}
    assert dgx.gpus["3"].uuid in listed


def test_a_file_of_the_images_under_a_librarys_name(
    dgx: SimNode, specs: dict[str, Path], start_cdi: StartCdi, tmp_path: Path
) -> None:
    """The image's file stays as it is, and the container has the node's library there, as from the prestart hook."""
    rootfs = tmp_path / "rootfs"
    make_root(rootfs, "debian", True, None)
    name = f"{FOLDERS['debian'][0]}/libcuda.so.1"
    (rootfs / name[1:]).write_text("the image's own")
    with start_cdi(dgx, specs["hooked"], "3", rootfs=rootfs) as container:
        inside = os.stat(f"{container.root}{name}")
        library = os.stat(f"{dgx.path}{name}")
        assert (inside.st_dev, inside.st_ino) == (library.st_dev, library.st_ino)
        assert {"ro", "nosuid", "nodev"} <= container.mounts()[name]
    assert (rootfs / name[1:]).read_text() == "the image's own"


def test_a_second_start_changes_nothing(
    dgx: SimNode, specs: dict[str, Path], start_cdi: StartCdi, tmp_path: Path
) -> None:
    rootfs = tmp_path / "rootfs"
    make_root(rootfs, "debian", True, None)
    with start_cdi(dgx, specs["hooked"], "3", rootfs=rootfs) as container:
        after_first = container.image()
    with start_cdi(dgx, specs["hooked"], "3", rootfs=rootfs) as container:
        assert container.image() == after_first


def test_a_mig_device_that_is_gone_starts_nothing(own_dgx: SimNode, start_cdi: StartCdi, tmp_path: Path) -> None:
    """A spec from before it went: the hook finds no capability to show, and undoes what it has done."""
    spec = generate(own_dgx, tmp_path / "spec.yaml")
    own_dgx.make(spec_from_profile("dgx-a100", mig={1: ("7g.40gb",)}))
    rootfs = tmp_path / "rootfs"
    make_root(rootfs, "debian", True, None)
    links = [path for path, entry in read_tree(rootfs).items() if entry.is_link]
    with (
        pytest.raises(StartFailed, match=r"capabilities/gpu2/mig/gi2/access is gone .*: `1:0` of .*`nvct cdi refresh`"),
        start_cdi(own_dgx, spec, "1:0", rootfs=rootfs),
    ):
        pass
    assert [path for path, entry in read_tree(rootfs).items() if entry.is_link] == links


def test_the_images_newer_cuda_goes_first(
    dgx: SimNode, specs: dict[str, Path], start_cdi: StartCdi, tmp_path: Path
) -> None:
    """Whether it fits is decided in the container, which a spec cannot know."""
    rootfs = tmp_path / "rootfs"
    make_root(rootfs, "debian", True, None)
    compat = rootfs / "usr/local/cuda/compat"
    compat.mkdir(parents=True)
    (compat / "libcuda.so.999.10").write_bytes(b"\x7fELF\x02\x01" + bytes(58))
    (compat / "libcuda.so.1").symlink_to("libcuda.so.999.10")
    with start_cdi(dgx, specs["hooked"], "3", rootfs=rootfs) as container:
        names = container.loader_names()
    assert names["libcuda.so.1", 64].startswith("/usr/local/cuda/compat/libcuda.so.")
