"""MIG as the driver does it: names, placements, ids and minors against published figures."""

from __future__ import annotations

import pytest

from nvct.record import replace
from nvct.sim import mig
from nvct.sim.errors import SimError
from nvct.sim.profiles import CARDS, PROFILES, cuda_of, spec_from_profile
from nvct.sim.spec import Card, GpuSpec, MigProfile

A100 = GpuSpec(CARDS["a100-40"], "GPU-00112233-4455-6677-8899-aabbccddeeff", 0, "00000000:07:00.0")


def placed(gpu: GpuSpec, *names: str) -> list[tuple[int, int]]:
    return [(instance.id, instance.start) for instance in mig.layout(replace(gpu, mig=names))]


@pytest.mark.parametrize(
    ("total_mib", "names"),
    [
        (40536, "5 10 20 40"),
        (81559, "10 20 40 80"),
        (95830, "12 24 47 94"),
        (143771, "18 35 71 141"),
        (183359, "23 45 90 180"),
        (189471, "23 47 93 186"),
        (275040, "34 67 135 269"),
        (284208, "35 70 139 278"),
    ],
)
def test_a_name_has_the_memory_rounded_half_up(total_mib: int, names: str) -> None:
    card = replace(CARDS["a100-40"], memory_mib=total_mib)
    profiles = [MigProfile(0, 0, 1, 1, 1, (0,), (0,), total_mib * e // 8 - 100, 1, 1, 0) for e in (1, 2, 4, 8)]
    assert [mig.profile_name(card, profile) for profile in profiles] == [f"1g.{n}gb" for n in names.split()]


def names_of(card: Card) -> list[str]:
    return [mig.profile_name(card, profile) for profile in card.mig_profiles]


def test_profile_names_of_the_cards() -> None:
    assert names_of(CARDS["a30"]) == ["1g.6gb", "1g.6gb+me", "2g.12gb", "2g.12gb+me", "4g.24gb"]
    assert names_of(CARDS["h200"])[-1] == "7g.141gb"
    assert names_of(CARDS["b200"])[2] == "1g.45gb"
    assert names_of(CARDS["t4"]) == []


@pytest.mark.parametrize(
    ("names", "instances"),
    [
        (("1g.5gb",) * 7, [(7, 0), (8, 1), (9, 2), (10, 3), (11, 4), (12, 5), (13, 6)]),
        (("1g.5gb",), [(13, 6)]),
        (("3g.20gb", "2g.10gb", "1g.5gb"), [(2, 4), (3, 0), (9, 2)]),
        (("2g.10gb",), [(5, 4)]),
        (("7g.40gb",), [(0, 0)]),
        (("4g.20gb", "3g.20gb"), [(1, 0), (2, 4)]),
        (("1g.10gb@6", "3g.20gb@0"), [(1, 0), (6, 6)]),
        ((), []),
    ],
)
def test_instances_are_placed_in_the_drivers_order(names: tuple[str, ...], instances: list[tuple[int, int]]) -> None:
    assert placed(A100, *names) == instances


def test_a30_ids_follow_from_four_slots() -> None:
    a30 = replace(A100, card=CARDS["a30"])
    assert placed(a30, "1g.6gb", "1g.6gb", "1g.6gb", "1g.6gb") == [(3, 0), (4, 1), (5, 2), (6, 3)]
    assert placed(a30, "2g.12gb", "2g.12gb") == [(1, 0), (2, 2)]
    assert placed(a30, "4g.24gb") == [(0, 0)]


def test_sub_slices_share_a_gpu_instance_while_there_is_room() -> None:
    first, second = mig.layout(replace(A100, mig=("1c.3g.20gb", "2c.3g.20gb", "1c.3g.20gb")))
    assert [(c.id, c.start, c.slices) for c in first.compute] == [(0, 0, 1)]
    assert (second.id, [(c.id, c.start, c.slices) for c in second.compute]) == (2, [(0, 0, 1), (1, 1, 2)])


def test_capability_minors_are_those_of_real_nodes() -> None:
    assert mig.gpu_instance_minor(0, 0) == 3
    assert mig.gpu_instance_minor(0, 2) == 21
    assert mig.compute_instance_minor(0, 2, 0) == 22
    assert mig.gpu_instance_minor(1, 0) == 138


def test_uuids_are_stable_and_differ_by_instance() -> None:
    names = ("1g.5gb",) * 7
    uuids = [instance.compute[0].uuid for instance in mig.layout(replace(A100, mig=names))]
    assert uuids == [instance.compute[0].uuid for instance in mig.layout(replace(A100, mig=names))]
    assert len(set(uuids)) == 7
    assert uuids[0].startswith("MIG-")


@pytest.mark.parametrize(
    ("card", "names", "said"),
    [
        ("a100-40", ("1g.5gb",) * 8, "'1g.5gb' does not fit"),
        ("a100-40", ("7g.40gb", "1g.5gb"), "beside 7g.40gb@0"),
        ("a100-40", ("4g.20gb", "4g.20gb"), "at most 1"),
        ("a100-40", ("1g.5gb+me", "1g.5gb+me"), "at most 1"),
        ("a100-40", ("1g.6gb",), "valid: 1g.10gb"),
        ("a100-40", ("2g.10gb@1",), "valid starts: (0, 2, 4)"),
        ("a100-40", ("4c.3g.20gb",), "4 compute slices, its GPU instance has 3"),
        ("a100-40", ("",), "no MIG profile"),
        ("t4", ("1g.5gb",), "has no MIG"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(card: str, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(SimError) as refused:
        mig.layout(replace(A100, card=CARDS[card], mig=names))
    assert said in str(refused.value)


@pytest.mark.parametrize("name", [name for name, profile in PROFILES.items() if len(profile.buses) > 2])
def test_index_minor_and_bus_order_are_three_permutations(name: str) -> None:
    gpus = spec_from_profile(name).gpus
    minors = [gpu.minor for gpu in gpus]
    buses = sorted(gpu.bus_id for gpu in gpus)
    ranks = [buses.index(gpu.bus_id) for gpu in gpus]
    everyone = list(range(len(gpus)))
    assert sorted(minors) == sorted(ranks) == everyone
    assert all(len({index, minors[index], ranks[index]}) == 3 for index in everyone)


def test_a_profile_can_be_asked_for_less_gpus_and_other_versions() -> None:
    spec = spec_from_profile("dgx-a100", gpus=2, driver="470.57.02")
    assert (len(spec.gpus), spec.driver, spec.cuda) == (2, "470.57.02", "11.4")
    assert spec_from_profile("t4", gpus=0).gpus == ()
    assert cuda_of("552.1") == "12.4"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "a100"}, "valid: dgx-a100"),
        ({"name": "t4", "gpus": 2}, "0 to 1 GPUs, not 2"),
        ({"name": "t4", "mig": {1: ()}}, "MIG layout for GPU 1"),
        ({"name": "t4", "driver": "550.x"}, "driver version '550.x'"),
        ({"name": "t4", "cuda": "12"}, "CUDA version '12'"),
    ],
)
def test_what_a_profile_has_not_is_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(SimError) as refused:
        spec_from_profile(**arguments)  # type: ignore[arg-type]
    assert said in str(refused.value)
