"""A hundred containers started at once, on a node that is not known or no longer as it was known."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from nvct.record import replace
from nvct.sim.spec import NvmlBehaviour
from tests.support.expect import wanted
from tests.support.nodes import SimNode
from tests.support.runc import RuncContainer, Start
from tests.support.watch import nvml_starts

pytestmark = pytest.mark.engine

NUMBER = 100


def forget(node: SimNode) -> None:
    node.forget()


def outdate(node: SimNode) -> None:
    """The kept inventory is of an earlier boot, and forged: whoever believes it gets a neighbour's devices."""
    boot = node.path / "proc/sys/kernel/random/boot_id"
    forge(node, {boot.read_text().strip(): "another boot"})


def mislead(node: SimNode) -> None:
    """The same with a stamp that is right: only what is read at the last moment, the majors, tells that it is wrong."""
    major = f'"nvidia-uvm": {node.majors["nvidia-uvm"]}'
    text = node.cache.read_text()
    stamp, inventory = text.split('"inventory": ')
    node.cache.write_text(stamp + '"inventory": ' + inventory.replace(major, f"{major}9"))
    forge(node, {})


def forge(node: SimNode, changes: dict[str, str]) -> None:
    pairs = [(node.gpus["2"].uuid, node.gpus["3"].uuid), (node.mig["0:0"].uuid, node.mig["0:1"].uuid)]
    text = node.cache.read_text()
    for one, other in [*pairs, *changes.items()]:
        assert one in text
        text = text.replace(one, "between").replace(other, one).replace("between", other)
    node.cache.write_text(text)


def request(number: int) -> list[str]:
    """MIG devices, GPUs, and both."""
    mig = ("0:0", "0:1", "0:2", "0:3", "0:4", "0:5", "0:6", "1:0", "1:1", "1:2")[number % 10]
    gpu = str(2 + number % 6)
    return ([mig], [gpu], [mig, gpu])[number % 3]


WAYS = [
    pytest.param("v1", forget, id="v1-nothing-known"),
    pytest.param("v2", forget, id="v2-nothing-known", marks=pytest.mark.slow),
    pytest.param("v1", outdate, id="v1-an-earlier-boot", marks=pytest.mark.slow),
    pytest.param("v2", outdate, id="v2-an-earlier-boot", marks=pytest.mark.slow),
    pytest.param("v1", mislead, id="v1-looks-fresh", marks=pytest.mark.slow),
    pytest.param("v2", mislead, id="v2-looks-fresh"),
]


@pytest.mark.parametrize(("cgroups", "known"), WAYS, indirect=["cgroups"])
def test_a_hundred_starts_at_once(
    own_dgx: SimNode, start: Start, cgroups: list[str], known: Callable[[SimNode], None]
) -> None:
    """NVML takes half a second, as on many nodes, so that all of them come while the first one waits."""
    own_dgx.make(replace(own_dgx.spec, nvml=NvmlBehaviour(delay_s=0.5)))
    with nvml_starts(own_dgx) as opens, ExitStack() as running:
        with start(own_dgx, {"NVIDIA_VISIBLE_DEVICES": "2"}):
            once = opens.count()
        assert once > 0
        known(own_dgx)

        def start_one(number: int) -> RuncContainer:
            env = {"NVIDIA_VISIBLE_DEVICES": ",".join(request(number))}
            return running.enter_context(start(own_dgx, env, family="busybox", prefix=cgroups))

        with ThreadPoolExecutor(NUMBER) as pool:
            containers = list(pool.map(start_one, range(NUMBER)))
        assert opens.count() == once
        numbers = own_dgx.device_numbers()
        for number, container in enumerate(containers):
            expected = wanted(own_dgx, request(number), family="busybox")
            assert container.look(numbers).opens == expected["opens"], request(number)
