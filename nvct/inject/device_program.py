"""Device programs of a cgroup v2 as bytes: put leave for some devices before a program, and recognise that leave.

A device program (BPF_PROG_TYPE_CGROUP_DEVICE) is asked at every open and mknod of a device and answers 1 for yes. The
question, struct bpf_cgroup_dev_ctx of linux/bpf.h: access << 16 | type, major, minor; 32 bits each. An instruction,
struct bpf_insn there, has 8 bytes: code, registers (source << 4 | destination), 16-bit offset, 32-bit constant.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

INSTRUCTION = 8  # bytes

# Values in the question, and codes of instructions; linux/bpf.h and linux/bpf_common.h.
CHARACTER_DEVICE = 2
MAKE, READ, WRITE = 1, 2, 4

LOAD_32 = 0x61
SET = 0xB7
COPY = 0xBF
AND = 0x57
SHIFT_RIGHT = 0x77
JUMP = 0x05
JUMP_EQUAL = 0x15
JUMP_NOT_EQUAL = 0x55
JUMP_ANY_BIT = 0x45
EXIT = 0x95
CALL = 0x85
LOAD_CONSTANT_64 = 0x18

# The kernel's own scratch register, which only its constant blinding uses.
_BLINDING_REGISTER = 11

# "nvct" in the answer's register, which is overwritten before anybody reads it. It is executed, so the verifier keeps
# it.
_MARK = 0x6E766374
_HEADER_LENGTH = 9


def instruction(code: int, to: int = 0, source: int = 0, offset: int = 0, constant: int = 0) -> bytes:
    """One instruction. `offset` counts instructions for jumps (from the next one), bytes for loads."""
    head = bytes((code, source << 4 | to))
    return head + offset.to_bytes(2, "little", signed=True) + constant.to_bytes(4, "little", signed=True)


def extended(program: bytes, numbers: Iterable[tuple[int, int]]) -> bytes:
    """`program` with leave to read and write the character devices `numbers` (major, minor), and not to make their
    nodes.

    A prologue of ours grows rather than gets another before it; `program` itself comes back when it gives this leave
    already.
    """
    known, rest = split(program)
    wanted = known.union(numbers)
    return program if wanted == known else prologue(wanted) + rest


def split(program: bytes) -> tuple[frozenset[tuple[int, int]], bytes]:
    """The devices to which a prologue of ours gives leave, and the program behind it: (nothing, all) without a
    prologue.
    """
    numbers = set()
    at = _HEADER_LENGTH * INSTRUCTION
    while program.startswith(bytes((JUMP_NOT_EQUAL,)), at):
        numbers.add((_constant(program, at), _constant(program, at + INSTRUCTION)))
        at += 2 * INSTRUCTION
    ours = prologue(numbers)
    if numbers and program.startswith(ours):
        return frozenset(numbers), program[len(ours) :]
    return frozenset(), program


def prologue(numbers: Iterable[tuple[int, int]]) -> bytes:
    """Instructions that answer yes to reading and writing `numbers` (major, minor), and go on to what follows
    otherwise.

    Only register 1, the question, survives them, and a program may rely on nothing else at its start. Devices are
    sorted and
    distinct: then every branch can be taken, and the verifier, which removes dead ones, leaves the text as it is.
    """
    ordered = sorted(set(numbers))
    length = _HEADER_LENGTH + 2 * len(ordered) + 3
    allow = length - 2
    code = [
        instruction(SET, 0, constant=_MARK),
        instruction(LOAD_32, 2, 1, offset=0),
        instruction(COPY, 3, 2),
        instruction(AND, 2, constant=0xFFFF),
        instruction(JUMP_NOT_EQUAL, 2, offset=length - 5, constant=CHARACTER_DEVICE),
        instruction(SHIFT_RIGHT, 3, constant=16),
        instruction(JUMP_ANY_BIT, 3, offset=length - 7, constant=~(READ | WRITE)),
        instruction(LOAD_32, 4, 1, offset=4),
        instruction(LOAD_32, 5, 1, offset=8),
    ]
    for major, minor in ordered:
        code.append(instruction(JUMP_NOT_EQUAL, 4, offset=1, constant=major))
        code.append(instruction(JUMP_EQUAL, 5, offset=allow - len(code) - 1, constant=minor))
    code += [instruction(JUMP, offset=2), instruction(SET, 0, constant=1), instruction(EXIT)]
    return b"".join(code)


def obstacle(program: bytes) -> str:
    """Why these instructions, as the kernel gives them back, cannot be loaded again, with the next step; "" when they
    can.

    The kernel gives zeros, or instructions with its scratch register, for a program whose constants it has blinded.
    Calls and
    references to maps come back as addresses and ids that mean something else in a new program (kernel/bpf/syscall.c).
    """
    if not program:
        return "the kernel hides its instructions from this process: run the hook with CAP_BPF or CAP_SYS_ADMIN"
    words = [program[at : at + INSTRUCTION] for at in range(0, len(program), INSTRUCTION)]
    if not any(program) or any(_BLINDING_REGISTER in (word[1] >> 4, word[1] & 15) for word in words):
        return (
            "JIT hardening has blinded it: set sysctl net.core.bpf_jit_harden to 0 or 1 and start the container again"
        )
    if any(word[0] == CALL for word in words):
        return "it calls functions, which cannot be carried over: let the engine allow the devices, by a CDI spec"
    if any(word[0] == LOAD_CONSTANT_64 and word[1] >> 4 for word in words):
        return "it uses maps, which cannot be carried over: let the engine allow the devices, by a CDI spec"
    return ""


def _constant(program: bytes, at: int) -> int:
    return int.from_bytes(program[at + 4 : at + INSTRUCTION], "little", signed=True)
