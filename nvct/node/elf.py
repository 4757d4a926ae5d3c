"""What a library file itself says: for which machine it is, and under which name programs ask for it."""

from __future__ import annotations

from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile

from nvct.record import record


@record
class Elf:
    """`machine` is e_machine as pyelftools spells it (`EM_X86_64`), `bits` 32 or 64, `soname` DT_SONAME or ""."""

    machine: str
    bits: int
    soname: str


def read_elf(path: str) -> Elf:
    """Read a library's header and dynamic section. Raises OSError, and ValueError when it is no sound ELF file."""
    with open(path, "rb") as stream:
        try:
            elf = ELFFile(stream)
            return Elf(str(elf["e_machine"]), int(elf.elfclass), _soname(elf))
        except OSError:
            raise
        except Exception as error:  # a damaged file makes pyelftools raise whatever its parsers do
            raise ValueError(f"{type(error).__name__}: {error}") from None


def _soname(elf: ELFFile) -> str:
    for segment in elf.iter_segments(type="PT_DYNAMIC"):
        if isinstance(segment, DynamicSegment):
            for tag in segment.iter_tags("DT_SONAME"):
                return str(tag.soname)  # type: ignore[attr-defined]  # set on tags of this kind
    return ""
