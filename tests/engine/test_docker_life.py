"""Containers of a real dockerd through their life: restarts, copies, another driver on the node, and their end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nvct.ldcache import parse
from nvct.record import replace
from nvct.sim.profiles import spec_from_profile
from tests.support.docker import (
    DockerContainer,
    Dockerd,
    Member,
    assert_exactly,
    device_nodes,
    dockerd_on,
    why_no_dockerd,
)
from tests.support.nodes import DGX_MIG, SimNode, dgx_a100, kept

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(why_no_dockerd()), reason=f"dockerd cannot run here: {why_no_dockerd()}"),
]

OLD = spec_from_profile("dgx-a100", mig=DGX_MIG, driver="550.163.01")
# Without the fabric manager, and with fewer libraries and programs, as older drivers and smaller packages are.
NEW = replace(
    spec_from_profile("dgx-a100", mig=DGX_MIG, driver="470.256.02"),
    fabric_manager=False,
    missing=("usr/lib/*/libcudadebugger*", "usr/lib/*/libnvidia-cfg*", "usr/bin/nvidia-cuda-mps-*"),
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimNode]:
    with kept(dgx_a100(tmp_path_factory.mktemp("docker") / "node", OLD.driver)) as node:
        yield node


@pytest.fixture(scope="module")
def dockerd(tmp_path_factory: pytest.TempPathFactory, node: SimNode) -> Iterator[Dockerd]:
    with dockerd_on(node, tmp_path_factory.mktemp("dockerd")) as dockerd:
        yield dockerd


@pytest.fixture
def new_driver(node: SimNode) -> Iterator[None]:
    """After the test the node has its first driver again."""
    yield
    node.make(OLD)


def names_of_the_loader(dockerd: Dockerd, name: str) -> dict[tuple[str, int], str]:
    """(name, flags) → path of the loader cache in a container's own file system."""
    return {(entry.name, entry.flags): entry.path for entry in parse(dockerd.file(name, "/etc/ld.so.cache")).entries}


def state_of(container: DockerContainer, image: str) -> tuple[object, ...]:
    """All that a start makes: the layer, the mounts, the device rules, the loader's names."""
    names = names_of_the_loader(container.dockerd, container.name)
    return container.added(image), container.mounts(), container.device_rules(), names


def foreign(layer: dict[str, Member]) -> list[str]:
    """What there is in a layer beyond folders, links, empty files to mount on, and the loader cache."""
    return [
        path
        for path, found in layer.items()
        if found.kind == "other" or (found.kind == "file" and found.size and path != "etc/ld.so.cache")
    ]


@pytest.mark.parametrize("family", ["debian", "lib64"])
def test_started_again_is_as_started_once(dockerd: Dockerd, node: SimNode, family: str) -> None:
    image = dockerd.image(family)
    with dockerd.container(image, "--gpus", '"device=0:1,4"') as container:
        once = state_of(container, image)
        dockerd.docker("restart", "--time", "0", container.name)
        assert_exactly(container, node, ("0:1", "4"))
        assert state_of(container, image) == once
        dockerd.docker("stop", "--time", "0", container.name)
        dockerd.docker("start", container.name)
        assert_exactly(container, node, ("0:1", "4"))
        assert state_of(container, image) == once


def test_a_removed_container_leaves_nothing(dockerd: Dockerd, node: SimNode) -> None:
    image = dockerd.image("debian")
    with dockerd.container(image, "--gpus", "all") as container:
        layer = container.added(image)
        assert "usr/bin/nvidia-smi" in layer
        assert foreign(layer) == []
        assert dockerd.leftovers(patience=0) != []  # so it would be seen
    assert dockerd.leftovers() == []
    assert dockerd.docker("ps", "--all", "--quiet") == ""


def test_a_committed_image_holds_no_file_of_the_host(dockerd: Dockerd, node: SimNode) -> None:
    image = dockerd.image("debian")
    with dockerd.container(image, "--gpus", '"device=2,1:1"') as container:
        copy = dockerd.docker("commit", container.name, "nvct-copy")
    assert "NVIDIA" not in dockerd.docker("inspect", "--format", "{{json .Config}}", copy)
    with dockerd.container(copy) as without:
        layer = without.added(image)
        assert "usr/bin/nvidia-smi" in layer
        assert foreign(layer) == []
        assert without.nodes() == {}
        assert without.opens(set(device_nodes(node.path).values())) == set()
    with dockerd.container(copy, "--gpus", '"device=0:6,5"') as container:
        assert_exactly(container, node, ("0:6", "5"))


@pytest.mark.usefixtures("new_driver")
@pytest.mark.parametrize("family", ["debian", "lib64"])
def test_another_driver_between_stop_and_start(dockerd: Dockerd, node: SimNode, dlopen_all: Path, family: str) -> None:
    image = dockerd.image(family)
    options = (
        "--volume",
        f"{dlopen_all}:/usr/bin/dlopen_all:ro",
        "--env",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video,graphics,compat32,ngx",
        "--gpus",
        "all",
    )
    with dockerd.container(image, *options) as container:
        copy = dockerd.docker("commit", container.name, f"nvct-old-{family}")
        dockerd.docker("stop", "--time", "0", container.name)
        node.make(NEW)
        dockerd.docker("start", container.name)
        with dockerd.container(image, *options) as fresh, dockerd.container(copy, *options) as copied:
            expected = comparable(fresh.added(image))
            names = names_of_the_loader(dockerd, fresh.name)
            for aged in (container, copied):
                assert comparable(aged.added(image)) == expected
                assert names_of_the_loader(dockerd, aged.name) == names
                # 32-bit libraries, which this program cannot load, have the names of 64-bit ones.
                assert_everything_loads(aged, {name for name, _ in names})
                assert_exactly(aged, node, tuple(node.mig) + tuple("234567"), graphics=True)


def comparable(layer: dict[str, Member]) -> dict[str, Member]:
    """Without what may differ: a loader cache keeps room that earlier entries had, and a socket's empty folder stays,
    since it may be the host's.
    """
    kept = {path: found for path, found in layer.items() if path != "run/nvidia-fabricmanager"}
    return {**kept, "etc/ld.so.cache": replace(kept["etc/ld.so.cache"], size=0)}


def assert_everything_loads(container: DockerContainer, names: set[str]) -> None:
    said = container.sh(f"dlopen_all {' '.join(sorted(names))}").splitlines()
    assert len(said) == len(names)
    assert [line for line in said if "\t!\t" in line] == []
