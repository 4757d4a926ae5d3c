"""The benchmark's figures as a table, and README's section "What it costs", which is made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.runc import TREE

RESULTS = Path(__file__).with_name("results.json")
README = TREE / "README.md"

# README's section: from its heading to the next one.
HEADING = "## What it costs\n"

SECTION = """
`make bench` measures the hook when the inventory is fresh: its process alone, on a container of its own each time (on a
tmpfs, with a device cgroup), and what it adds to `runc run` (on this machine's disk), all in one run and in random
rotation. The unit is the time that Python takes to start and do nothing, `python3 -I -S -c pass`, here
{yardstick:.1f} ms; `runc run` without a hook takes {runc:.0f} ms. Medians of at least {runs} runs on {machine}:

{table}

NVML is asked once, when the node has changed since the inventory was made. A container that asks for no GPU is
recognised by a shell script, and no Python is started.{left_out}

"""


def rows(results: dict[str, Any]) -> list[list[str]]:
    """A heading, then a row for every case."""
    lines = [["Container", "Hook, ms", "x Python", "Goal", "Peak, MiB", "Added to `runc run`, ms", "x Python"]]
    for key, case in results["cases"].items():
        lines.append(
            [
                f"{key}: {case['title']}",
                f"{case['hook_s'] * 1000:.1f}",
                f"{case['hook_ratio']:.2f}",
                f"{case['goal_ratio']:.1f}",
                f"{case['peak_kib'] / 1024:.1f}",
                f"{case['added_s'] * 1000:.1f}",
                f"{case['added_ratio']:.2f}",
            ]
        )
    return lines


def text_table(results: dict[str, Any]) -> str:
    """For a terminal."""
    lines = rows(results)
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = ["  ".join(_padded(cell, width, at) for at, (cell, width) in enumerate(zip(line, widths))) for line in lines]
    unit = f"python3 -I -S -c pass: {results['yardstick_s'] * 1000:.1f} ms; runc run: {results['runc_s'] * 1000:.1f} ms"
    return "\n".join((*text, unit))


def _padded(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)


def readme_section(results: dict[str, Any]) -> str:
    heading, *lines = rows(results)
    ruler = ["---", *["---:"] * (len(heading) - 1)]
    machine = results["machine"]
    return SECTION.format(
        yardstick=results["yardstick_s"] * 1000,
        runc=results["runc_s"] * 1000,
        runs=min(case["runs"] for case in results["cases"].values()),
        machine=f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python {machine['python']}",
        table="\n".join("| " + " | ".join(line) + " |" for line in (heading, ruler, *lines)),
        left_out="" if results["device_cgroup"] == "v1" else " The hook alone was measured without a device cgroup.",
    )


def update_readme(results: dict[str, Any]) -> None:
    before, heading, rest = README.read_text().partition(HEADING)
    _, mark, after = rest.partition("## ")
    README.write_text(before + heading + readme_section(results) + mark + after)


def in_readme() -> str:
    """What README says there now."""
    return README.read_text().partition(HEADING)[2].partition("## ")[0]
