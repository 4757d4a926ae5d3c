"""Whether the conditions that an image puts on driver and GPU hold here: unmet, it would fail later, and darkly."""

from __future__ import annotations

from nvct.errors import RequestError
from nvct.model import Ask, Gpu, Inventory, Request
from nvct.plan.devices import Choice, gpu_name
from nvct.plan.words import quoted
from nvct.requirements import Malformed, Term, Unmet, parse, unmet
from nvct.settings import Settings

_MOST_TERMS = 3  # images carry a dozen alternatives; the first ones tell enough
_ANYWAY = "or set NVIDIA_DISABLE_REQUIRE=true to start the container anyway"


def check_requirements(inventory: Inventory, request: Request, settings: Settings, choice: Choice) -> None:
    """Raise RequestError when a condition is malformed, or does not hold for a GPU that the container gets.

    A MIG device counts as its GPU. Without a GPU the conditions on the driver are what can be checked.
    """
    if request.requirements_disabled or settings.disable_require:
        return
    subjects: list[tuple[str, Gpu | None]] = [(f"GPU {gpu_name(chosen.gpu)}", chosen.gpu) for chosen in choice.gpus]
    for ask in _requirements(request):
        terms = _parsed(ask)
        for name, gpu in subjects or [("this node", None)]:
            failures = unmet(terms, _facts(inventory, gpu))
            if failures:
                raise RequestError(f"{ask.source}: {name} does not meet {_compared(failures)}; {_advice(failures)}")


def check_driver(inventory: Inventory, request: Request, settings: Settings) -> None:
    """The same for a container whose GPUs, if any, are not known here: only conditions on the driver are checked."""
    check_requirements(inventory, request, settings, Choice((), (), ()))


def _requirements(request: Request) -> tuple[Ask, ...]:
    if not request.legacy_cuda:
        return request.requirements
    return (Ask("env CUDA_VERSION", (f"cuda>={_major_minor(request.legacy_cuda)}",)), *request.requirements)


def _major_minor(version: str) -> str:
    """The first two numbers of a version of one to three: `v9`, `9.0`, `9.0.176`, `9.0.176-1`."""
    parts = version.strip().removeprefix("v").partition("+")[0].partition("-")[0].split(".")
    if len(parts) > 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise RequestError(
            f"{quoted(version)} in env CUDA_VERSION: expected a version such as 9.0.176, since an image without "
            f"NVIDIA_REQUIRE_CUDA needs that much of the driver; set NVIDIA_REQUIRE_CUDA, {_ANYWAY}"
        )
    return ".".join((*parts, "0")[:2])


def _parsed(ask: Ask) -> tuple[Term, ...]:
    try:
        return parse(ask.tokens[0])
    except Malformed as malformed:
        raise RequestError(f"{quoted(malformed.text)} in {ask.source} {malformed.reason}; mend it, {_ANYWAY}") from None


def _facts(inventory: Inventory, gpu: Gpu | None) -> dict[str, str]:
    facts = {"cuda": inventory.cuda_version, "driver": inventory.driver_version}
    if gpu:
        facts.update(arch=gpu.compute_capability, brand=gpu.brand)
    return facts


def _compared(failures: tuple[Unmet, ...]) -> str:
    shown = ", nor ".join(
        f"{quoted(failure.term.text)} ({failure.factor.name} is {failure.fact})" for failure in failures[:_MOST_TERMS]
    )
    more = len(failures) - _MOST_TERMS
    return f"{shown}, nor {more} more alternatives" if more > 0 else shown


def _advice(failures: tuple[Unmet, ...]) -> str:
    factors = [failure.factor for failure in failures]
    if any(factor.name in ("cuda", "driver") and factor.operator in (">", ">=") for factor in factors):
        return f"update the driver of this node, use an image for an older CUDA, {_ANYWAY}"
    if any(factor.name in ("cuda", "driver") for factor in factors):
        return f"use an image for this driver ({failures[0].factor.name} is {failures[0].fact}), {_ANYWAY}"
    return f"ask for another GPU, use another image, {_ANYWAY}"
