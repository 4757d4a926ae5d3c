"""`docker run --gpus` on a real dockerd: every form of asking gives exactly those devices, and nothing more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.docker import (
    LESSER_RUNC,
    DockerContainer,
    Dockerd,
    assert_exactly,
    device_nodes,
    dockerd_on,
    why_no_dockerd,
)
from tests.support.nodes import SimNode

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(why_no_dockerd()), reason=f"dockerd cannot run here: {why_no_dockerd()}"),
]

WHOLE = ("2", "3", "4", "5", "6", "7")  # GPUs that are not divided into MIG devices
MIG = ("0:0", "0:1", "0:2", "0:3", "0:4", "0:5", "0:6", "1:0", "1:1", "1:2")
ALL_CAPABILITIES = '"capabilities=compute,utility"'


@pytest.fixture(scope="module")
def dockerd(tmp_path_factory: pytest.TempPathFactory, dgx: SimNode) -> Iterator[Dockerd]:
    with dockerd_on(dgx, tmp_path_factory.mktemp("dockerd")) as dockerd:
        yield dockerd


def gpu_files(container: DockerContainer, image: str) -> list[str]:
    """Paths in the container's writable layer that only a driver has."""
    return [path for path in container.added(image) if "nvidia" in path or "cuda" in path or path.endswith(".cache")]


@pytest.mark.parametrize(
    ("wish", "wanted"),
    [
        pytest.param("all", (*MIG, *WHOLE), id="all"),
        pytest.param("2", ("0", "1"), id="a count"),
        pytest.param('"device=0:1"', ("0:1",), id="a MIG index"),
        pytest.param('"device=2,3"', ("2", "3"), id="two indexes"),
        pytest.param("device=GPU-348f192c-0f36-5e46-b051-780a64c84056", ("5",), id="a GPU UUID"),
        pytest.param("device=GPU-348f192c", ("5",), id="a GPU UUID cut short"),
        pytest.param("device=MIG-2f2323bd-0c82-5b3c-9909-532e65cf9095", ("1:0",), id="a MIG UUID"),
        pytest.param('"device=7,1:2,GPU-e8358205-c00a-56c6-8a40-4db5812030a4"', ("7", "1:2", "4"), id="a mixture"),
        pytest.param(f"all,{ALL_CAPABILITIES}", (*MIG, *WHOLE), id="all with capabilities"),
    ],
)
def test_a_container_gets_what_it_asks_for(dockerd: Dockerd, dgx: SimNode, wish: str, wanted: tuple[str, ...]) -> None:
    with dockerd.container(dockerd.image("debian"), "--gpus", wish) as container:
        assert_exactly(container, dgx, wanted)


@pytest.mark.parametrize("family", ["lib64", "busybox"])
def test_other_images(dockerd: Dockerd, dgx: SimNode, family: str) -> None:
    with dockerd.container(dockerd.image(family), "--gpus", '"device=0:1,4"') as container:
        # Programs of the driver need a C library, which a busybox image has not.
        assert_exactly(container, dgx, ("0:1", "4"), listing=family != "busybox")


def test_a_read_only_container(dockerd: Dockerd, dgx: SimNode) -> None:
    with dockerd.container(dockerd.image("debian"), "--read-only", "--gpus", '"device=2,3"') as container:
        assert_exactly(container, dgx, ("2", "3"))
        assert "Read-only file system" in container.sh("touch /usr/bin/new")


def test_an_ordinary_user(dockerd: Dockerd, dgx: SimNode) -> None:
    with dockerd.container(dockerd.image("debian"), "--user", "1000", "--gpus", '"device=1:0,6"') as container:
        assert "Uid:\t1000\t1000" in container.run("cat", "/proc/self/status")
        assert_exactly(container, dgx, ("1:0", "6"))


def test_variables_of_the_image_do_not_outweigh_the_option(dockerd: Dockerd, dgx: SimNode) -> None:
    image = dockerd.image("debian", {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"})
    with dockerd.container(image, "--gpus", '"device=3",' + ALL_CAPABILITIES) as container:
        assert_exactly(container, dgx, ("3",))
        assert "libnvidia-encode" not in container.sh("ls /usr/lib/*")


@pytest.mark.parametrize("variable", ["", "all"], ids=["plain image", "image with ENV NVIDIA_VISIBLE_DEVICES=all"])
def test_without_the_option_there_is_nothing(dockerd: Dockerd, dgx: SimNode, variable: str) -> None:
    image = dockerd.image("debian", {"NVIDIA_VISIBLE_DEVICES": variable} if variable else {})
    with dockerd.container(image) as container:
        assert container.nodes() == {}
        assert container.opens(set(device_nodes(dgx.path).values())) == set()
        assert str(dgx.path) not in (container.process / "mountinfo").read_text()
        assert gpu_files(container, image) == []


@pytest.mark.parametrize(
    ("capabilities", "present", "absent"),
    [
        ("capabilities=utility", {"libnvidia-ml.so.1", "nvidia-smi"}, {"libcuda.so.1", "libnvidia-encode.so.1"}),
        ("capabilities=compute", {"libcuda.so.1"}, {"libnvidia-ml.so.1", "nvidia-smi", "libnvidia-encode.so.1"}),
        (ALL_CAPABILITIES, {"libcuda.so.1", "libnvidia-ml.so.1", "nvidia-smi"}, {"libnvidia-encode.so.1"}),
        ('"capabilities=video,utility"', {"libnvidia-encode.so.1", "libcuda.so.1"}, {"libGLX_nvidia.so.0"}),
        ("capabilities=graphics", {"libGLX_nvidia.so.0"}, {"nvidia-smi", "libnvidia-encode.so.1"}),
    ],
)
def test_capabilities_bring_their_files(
    dockerd: Dockerd, capabilities: str, present: set[str], absent: set[str]
) -> None:
    with dockerd.container(dockerd.image("lib64"), "--gpus", f"device=4,{capabilities}") as container:
        names = set(container.sh("ls /usr/bin /usr/lib64").split())
    assert present <= names
    assert not absent & names


def test_a_privileged_container_gets_its_wish_and_the_warning(dockerd: Dockerd, dgx: SimNode) -> None:
    options = ("--runtime", LESSER_RUNC, "--privileged", "--gpus", '"device=2,3"')
    with dockerd.container(dockerd.image("debian"), *options) as container:
        gpus = [dgx.gpus[name] for name in ("2", "3")]
        assert container.seen() == [gpu.uuid for gpu in gpus]
        assert {f"/dev/nvidia{gpu.minor}" for gpu in gpus} <= set(container.nodes())
        everything = set(device_nodes(dgx.path).values())
        assert container.opens(everything) == everything
        said = dockerd.hook_said(container)
    assert said.startswith("nvct: warning: the container has CAP_SYS_ADMIN, so nothing can be denied there")
    assert said.count("\n") == 1


def test_containers_side_by_side_are_denied_each_others(dockerd: Dockerd, dgx: SimNode) -> None:
    image = dockerd.image("debian")
    with (
        dockerd.container(image, "--gpus", '"device=0:1"') as first,
        dockerd.container(image, "--gpus", '"device=0:2"') as second,
        dockerd.container(image, "--gpus", '"device=2"') as third,
        dockerd.container(image) as without,
    ):
        assert_exactly(first, dgx, ("0:1",))
        assert_exactly(second, dgx, ("0:2",))
        assert_exactly(third, dgx, ("2",))
        assert without.nodes() == {}
        assert without.opens(set(device_nodes(dgx.path).values())) == set()


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (
            '"device=8"',
            (
                "nvct: `8` in env NVIDIA_VISIBLE_DEVICES: no GPU has this index",
                "valid are GPUs 0 to 7; MIG devices 0:0 to 0:6",
            ),
        ),
        ('"device=0:7"', ("nvct: `0:7` in", "GPU 0 (GPU-7d9959fa-39dc-5b9e-9859-0a682e6e3f49) has no such MIG device")),
        ("device=GPU-00000000", ("nvct: `GPU-00000000` in", "no GPU of this node has such a UUID", "valid are")),
        ("device=gpu0", ("nvct: `gpu0` in", "perhaps `0` is meant; see `nvct list`; valid are GPUs 0 to 7")),
    ],
)
def test_a_refusal_reaches_the_user_in_one_line(dockerd: Dockerd, wish: str, words: tuple[str, ...]) -> None:
    image = dockerd.image("debian")
    with dockerd.refused(image, "--gpus", wish) as (container, complaint):
        lines = [line for line in complaint.splitlines() if "nvct: " in line]
        assert len(lines) == 1
        for word in words:
            assert word in lines[0]
        assert gpu_files(container, image) == []


def test_a_failed_injection_leaves_the_layer_as_it_was(dockerd: Dockerd) -> None:
    image = dockerd.image("debian")
    in_the_way = ("--volume", "/usr/bin/nvidia-smi")  # docker makes it a folder
    with dockerd.refused(image, *in_the_way, "--gpus", "device=2") as (container, complaint):
        assert "nvct: mount driver files: " in complaint
        assert "/usr/bin/nvidia-smi" in complaint
        assert "everything done before was undone" in complaint
        assert gpu_files(container, image) == ["usr/bin/nvidia-smi"]
