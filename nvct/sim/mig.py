"""How MIG names, places and numbers things, as the driver does it. Pure arithmetic over the profile tables.

The product never uses this: it reads NVML and /proc. Only a simulated driver has to know the rules.
"""

from __future__ import annotations

import math
import re
import uuid

from nvct.record import record
from nvct.sim.errors import SimError
from nvct.sim.spec import Card, GpuSpec, MigProfile

_ASKED = re.compile(r"(?:(?P<slices>[0-9]{1,9})c\.)?(?P<name>[^@]+?)(?:@(?P<start>[0-9]{1,9}))?")

# Capability minors are laid out for every GPU minor, present or not: config, monitor, then per GPU 15 GPU instances
# with 8 compute instances each. So gpu0/gi0 is 3, gpu0/gi2 21, gpu1/gi0 138.
CONFIG_MINOR = 1
MONITOR_MINOR = 2
GPU_INSTANCES = 15
COMPUTE_INSTANCES = 8
_PER_INSTANCE = 1 + COMPUTE_INSTANCES
_PER_GPU = GPU_INSTANCES * _PER_INSTANCE


@record
class ComputeInstance:
    """A MIG device. `start` and `slices` count compute slices inside the GPU instance; minors are of the caps nodes."""

    id: int
    start: int
    slices: int
    minor: int
    uuid: str


@record
class GpuInstance:
    """`start` is its first memory slot; the size is the profile's."""

    id: int
    profile: MigProfile
    start: int
    minor: int
    compute: tuple[ComputeInstance, ...]


def profile_name(card: Card, profile: MigProfile) -> str:
    """`1g.5gb`: memory in eighths of the card's, of its size rounded up to GiB, halves rounded up."""
    eighths = math.ceil(8 * profile.memory_mib / card.memory_mib) / 8
    gigabytes = math.floor(eighths * math.ceil(card.memory_mib / 1024) + 0.5)
    return f"{profile.slices}g.{gigabytes}gb{profile.attribute}"


def gpu_instance_minor(gpu_minor: int, instance: int) -> int:
    return MONITOR_MINOR + 1 + gpu_minor * _PER_GPU + instance * _PER_INSTANCE


def compute_instance_minor(gpu_minor: int, instance: int, compute: int) -> int:
    return gpu_instance_minor(gpu_minor, instance) + 1 + compute


def layout(gpu: GpuSpec) -> tuple[GpuInstance, ...]:
    """The GPU instances of `gpu.mig`, by id, placed as the driver places them one after the other.

    A sub-slice (`1c.3g.20gb`) goes into the instance made just before it while that has the profile and room.
    Raises SimError with the GPU, the name and the valid ones where a name is unknown or does not fit.
    """
    names = {profile_name(gpu.card, profile): profile for profile in gpu.card.mig_profiles}
    made: list[GpuInstance] = []
    for asked in gpu.mig or ():
        slices, profile, start = _parse(asked, gpu, names)
        if made and start is None and slices < profile.slices and _room(made[-1], profile) >= slices:
            made[-1] = _with_compute(gpu, made[-1], slices)
        else:
            made.append(_with_compute(gpu, _place(gpu, made, profile, start, asked), slices))
    return tuple(sorted(made, key=lambda instance: instance.id))


def _parse(asked: str, gpu: GpuSpec, names: dict[str, MigProfile]) -> tuple[int, MigProfile, int | None]:
    if not names:
        raise SimError(f"{gpu.card.model} (minor {gpu.minor}) has no MIG, so {asked!r} cannot be made on it")
    match = _ASKED.fullmatch(asked)
    profile = names.get(match["name"]) if match else None
    if match is None or profile is None:
        raise SimError(f"{asked!r} is no MIG profile of {gpu.card.model}; valid: {', '.join(sorted(names))}")
    slices = int(match["slices"] or profile.slices)
    if not 1 <= slices <= profile.slices:
        raise SimError(f"{asked!r} asks for {slices} compute slices, its GPU instance has {profile.slices}")
    return slices, profile, int(match["start"]) if match["start"] else None


def _place(gpu: GpuSpec, made: list[GpuInstance], profile: MigProfile, start: int | None, asked: str) -> GpuInstance:
    if start is not None and start not in profile.starts:
        raise SimError(f"{asked!r} cannot start at slot {start} of {gpu.card.model}; valid starts: {profile.starts}")
    taken = {slot for other in made for slot in range(other.start, other.start + other.profile.size)}
    places = profile.fill if start is None else (start,)
    free = [place for place in places if not taken & set(range(place, place + profile.size))]
    if not free or sum(other.profile == profile for other in made) >= profile.max_instances:
        have = ", ".join(f"{profile_name(gpu.card, i.profile)}@{i.start}" for i in made) or "nothing"
        raise SimError(
            f"{asked!r} does not fit on {gpu.card.model} (minor {gpu.minor}) beside {have}; "
            f"at most {profile.max_instances} at starts {profile.starts}: drop one, or state starts as 1g.5gb@0"
        )
    number = gpu.card.mig_slots // profile.size - 1 + free[0] // profile.size
    return GpuInstance(number, profile, free[0], gpu_instance_minor(gpu.minor, number), ())


def _room(instance: GpuInstance, profile: MigProfile) -> int:
    if instance.profile != profile:
        return 0
    return profile.slices - sum(compute.slices for compute in instance.compute)


def _with_compute(gpu: GpuSpec, instance: GpuInstance, slices: int) -> GpuInstance:
    number = len(instance.compute)
    start = sum(compute.slices for compute in instance.compute)
    name = uuid.uuid5(uuid.UUID(gpu.uuid.removeprefix("GPU-")), f"{instance.id}/{number}")
    minor = compute_instance_minor(gpu.minor, instance.id, number)
    compute = ComputeInstance(number, start, slices, minor, f"MIG-{name}")
    return GpuInstance(instance.id, instance.profile, instance.start, instance.minor, (*instance.compute, compute))
