"""nvct's runtime under a real dockerd: what a container gets, and that it keeps it through what takes it from hooks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from nvct.edits import HOOK_ENV
from tests.support.docker import PROGRAMS, Dockerd, assert_exactly, device_nodes, why_no_dockerd
from tests.support.nodes import SimNode
from tests.support.runc import explained, kernel_hook, nvct_runtime

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(why_no_dockerd()), reason=f"dockerd cannot run here: {why_no_dockerd()}"),
]

DEVICES = "NVIDIA_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def dockerd(tmp_path_factory: pytest.TempPathFactory, dgx: SimNode) -> Iterator[Dockerd]:
    folder = tmp_path_factory.mktemp("dockerd")
    runtime = folder / "nvct"
    runtime.symlink_to(PROGRAMS / "node_runtime.py")
    told = {"hook": {**kernel_hook(dgx.path), "env": list(HOOK_ENV)}, "command": nvct_runtime(dgx.path)}
    (folder / "node-runtime.json").write_text(json.dumps(told))
    dockerd = Dockerd(folder, dgx.path, ["--add-runtime", f"nvct={runtime}", "--live-restore"])
    with dockerd:
        yield dockerd
        assert dockerd.leftovers() == []
    assert dockerd.leftovers(stopped=True) == []


def asking(value: str, *options: str) -> tuple[str, ...]:
    return ("--runtime", "nvct", "--env", f"{DEVICES}={value}", *options)


@pytest.mark.parametrize(
    ("family", "value", "wanted"),
    [
        ("debian", "0:1", ("0:1",)),
        ("lib64", "2,1:1", ("2", "1:1")),
        ("debian", "GPU-348f192c", ("5",)),
        ("debian", "nvidia.com/gpu=3", ("3",)),
        ("busybox", "4", ("4",)),
    ],
)
def test_a_container_gets_what_it_asks_for(
    dockerd: Dockerd, dgx: SimNode, family: str, value: str, wanted: tuple[str, ...]
) -> None:
    with dockerd.container(dockerd.image(family), *asking(value)) as container:
        assert_exactly(container, dgx, wanted, listing=family != "busybox")


def test_a_container_that_asks_for_nothing_gets_nothing(dockerd: Dockerd, dgx: SimNode) -> None:
    with dockerd.container(dockerd.image("debian"), "--runtime", "nvct") as container:
        assert container.nodes() == {}
        assert container.opens(set(device_nodes(dgx.path).values())) == set()


def test_both_ways_of_asking_give_each_device_once(dockerd: Dockerd, dgx: SimNode) -> None:
    """docker --gpus adds its hook, which the runtime takes out: it gives the devices itself."""
    options = ("--runtime", "nvct", "--gpus", '"device=0:1"')
    with dockerd.container(dockerd.image("debian"), *options) as container:
        assert_exactly(container, dgx, ("0:1",))
        mounts = container.mounts()
        assert "/dev/nvidiactl" not in mounts
        assert len(mounts) == len(set(mounts))


def test_a_restart_gives_the_same(dockerd: Dockerd, dgx: SimNode) -> None:
    image = dockerd.image("debian")
    with dockerd.container(image, *asking("0:1,4")) as container:
        once = container.added(image), container.mounts(), container.device_rules()
        for _ in range(2):
            dockerd.docker("restart", "--time", "0", container.name)
            assert_exactly(container, dgx, ("0:1", "4"))
            assert (container.added(image), container.mounts(), container.device_rules()) == once


def test_an_update_of_the_container_takes_nothing_away(dockerd: Dockerd, dgx: SimNode) -> None:
    with dockerd.container(dockerd.image("debian"), *asking("0:1,4")) as container:
        rules = container.device_rules()
        for options in (("--cpu-quota", "50000"), ("--memory", "256m", "--memory-swap", "256m"), ("--cpu-shares", "9")):
            dockerd.docker("update", *options, container.name)
            assert_exactly(container, dgx, ("0:1", "4"))
        assert container.device_rules() == rules


def test_a_daemon_that_starts_again_takes_nothing_away(dockerd: Dockerd, dgx: SimNode) -> None:
    with dockerd.container(dockerd.image("debian"), *asking("0:1,4")) as container:
        process = container.process
        dockerd.start_again()
        assert container.process == process
        assert_exactly(container, dgx, ("0:1", "4"))
        dockerd.docker("update", "--cpu-quota", "40000", container.name)
        assert_exactly(container, dgx, ("0:1", "4"))


def test_explain_knows_what_a_running_container_asked_for(dockerd: Dockerd, dgx: SimNode) -> None:
    """Of its first process, of one started later, and of each of several containers of an image."""
    image = dockerd.image("debian")
    with dockerd.container(image, *asking("0:1,4")) as one, dockerd.container(image, *asking("2")) as other:
        dockerd.docker("exec", "--detach", one.name, "/usr/bin/sleep", "601")
        later = dockerd.docker("top", one.name, "-C", "sleep", "-o", "pid,args").splitlines()
        (second,) = [line.split()[0] for line in later if line.endswith("601")]
        told = [explained(dgx.config, int(pid)) for pid in (one.process.name, other.process.name, second)]
        dockerd.docker("restart", "--time", "0", one.name)
        told.append(explained(dgx.config, int(one.process.name)))
    assert [",".join(asked["token"] for asked in each["asked"]) for each in told] == ["0:1,4", "2", "0:1,4", "0:1,4"]
    assert {each["carrier"] for each in told} == {"runtime"}
    assert all(each["comparison"]["unplanned"] == [] for each in told)
    absent = [[row["what"] for row in each["comparison"]["absent"]] for each in told]
    assert absent == [[], [], [DEVICES], []]  # docker gives a later process the variable as it knows it


def test_the_user_reads_why_a_request_is_refused(dockerd: Dockerd) -> None:
    image = dockerd.image("debian")
    with dockerd.refused(image, *asking("8")) as (container, complaint):
        assert "nvct: `8` in env NVIDIA_VISIBLE_DEVICES: no GPU has this index" in complaint
        assert container.added(image).keys() <= {"dev/console", "etc/hostname", "etc/hosts", "etc/resolv.conf"}


def test_links_by_number_are_there_for_every_device(dockerd: Dockerd, dgx: SimNode) -> None:
    folder = dgx.path / "dev/char"
    for link in folder.iterdir():
        link.unlink()
    with dockerd.container(dockerd.image("debian"), *asking("0:1")) as container:
        handed_out = container.nodes()
    assert len(handed_out) == 6
    found = {link.name: os.readlink(link) for link in folder.iterdir()}
    assert found == {
        f"{major}:{minor}": f"../{path.removeprefix('/dev/')}" for path, (major, minor) in handed_out.items()
    }
    for name in found:
        status = os.stat(folder / name)
        assert f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" == name
