"""Reads machine code from `cuobjdump --dump-sass`: instructions, their operands and their scheduling fields.

An instruction of compute capability 8.0 to 12.0 has 128 bits. The upper 23 of them control the issue: the cycles for
which the warp stalls, the one of six scoreboard barriers that the instruction sets, and the barriers for which it
waits. NVIDIA does not document them. The positions are those of Jia et al., "Dissecting the NVIDIA Volta GPU
Architecture via Microbenchmarking", 2018. check.py checks them for every traced load.
"""

import re
from dataclasses import dataclass, field
from functools import cache, cached_property

NO_BARRIER = 7
BARRIERS = 6
BYTES = 16
LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?)(U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s+/\* 0x([0-9a-f]{16}) \*/")
UPPER = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/\s*$")


@dataclass(frozen=True)
class Control:
    """Scheduling fields. A write barrier is released with the result, a read barrier once the operands are read."""

    stall: int
    yields: bool
    write_barrier: int
    read_barrier: int
    waits: int  # a bit per barrier
    reuse: int

    @staticmethod
    @cache
    def of(upper):
        return Control(upper >> 41 & 15, not upper >> 45 & 1, upper >> 46 & 7, upper >> 49 & 7, upper >> 52 & 63,
                       upper >> 58 & 15)

    def text(self):
        waits = "".join(str(k) if self.waits >> k & 1 else "-" for k in range(BARRIERS))
        write, read = ("-" if k == NO_BARRIER else str(k) for k in (self.write_barrier, self.read_barrier))
        return f"stall {self.stall:2}  wait {waits}  sets {write} reads {read}"


@dataclass(frozen=True)
class Operand:
    """``kind`` is R, UR, P, UP, number, constant, memory, special, or any other text."""

    kind: str
    number: int = 0  # register, or the value of a number
    negative: bool = False
    inverse: bool = False  # `~` of a register, `!` of a predicate
    magnitude: bool = False
    half: str = ""  # H0_H0, B1, H1: a part of the register
    terms: tuple = ()  # of an address: registers with their width, and numbers
    bank: int = 0
    text: str = ""

    @cached_property
    def is_plain(self):
        """Whether a register is read as it is. The register that is always zero has a separate name, and may be read
        as such.
        """
        return not (self.negative or self.inverse or self.magnitude or self.half)


ZERO_REGISTER, TRUE_PREDICATE, ZERO_UNIFORM = 255, 7, 63


@cache
def operand_of(text):
    text = text.strip()
    bare = text.replace(".reuse", "")
    if match := re.fullmatch(r"([-~!]*)(\|?)(R|UR|P|UP)(\d+|Z|T)\|?((?:\.[A-Z0-9_]+)*)", bare):
        sign, bars, kind, number, half = match.groups()
        last = {"R": ZERO_REGISTER, "UR": ZERO_UNIFORM, "P": TRUE_PREDICATE, "UP": TRUE_PREDICATE}[kind]
        return Operand(kind, int(number) if number.isdigit() else last, "-" in sign, "~" in sign or "!" in sign, bool(bars),
                       half.strip("."), text=text)
    if match := re.fullmatch(r"-?0x[0-9a-f]+", bare):
        return Operand("number", int(bare, 16), text=text)
    if match := re.fullmatch(r"(-?)(\|?)c\[0x([0-9a-f]+)\]\[([^\]]*)\]\|?((?:\.\w+)*)", bare):
        sign, bars, bank, address, _ = match.groups()
        return Operand("constant", negative=bool(sign), magnitude=bool(bars), terms=terms_of(address), bank=int(bank, 16),
                       text=text)
    if match := re.fullmatch(r"(?:desc\[(UR\d+)\])?\[([^\]]*)\]", bare):
        return Operand("memory", terms=terms_of(match[2]), text=text)
    if bare.startswith("SR_") or bare == "SRZ":
        return Operand("special", text=bare)
    return Operand("other", text=bare)


def terms_of(address):
    """[R2.64+UR4+0x10], [R3.X16+0x40]: (kind, register or number, words, factor)."""
    terms = []
    for term in re.findall(r"[+-]*[^+]+", address):
        term = term.lstrip("+")
        if match := re.fullmatch(r"(-?)(R|UR)(\d+|Z)((?:\.\w+)*)", term):
            kind, number, parts = match[2], match[3], match[4].split(".")
            number = int(number) if number != "Z" else ZERO_REGISTER if kind == "R" else ZERO_UNIFORM
            factor = next((int(part[1:]) for part in parts if re.fullmatch(r"X\d+", part)), 1)
            terms.append((kind, number, 2 if "64" in parts else 1, factor))
        else:
            terms.append(("number", int(term, 16), 1, 1))
    return tuple(terms)


@dataclass(frozen=True, eq=False)
class Instruction:
    address: int
    guard: Operand | None
    opcode: str
    parts: tuple
    operands: tuple
    control: Control
    text: str = field(compare=False)

    def has(self, part):
        return part in self.parts

    def target(self):
        """The address that a branch, a call or a BSSY names."""
        return self.operands[-1].number


def kernels_of(text):
    """The text of each kernel, by name and architecture, for instructions_of."""
    found = {}
    for image in re.split(r"code for sm_", text)[1:]:
        architecture = re.match(r"\d+", image)[0]
        for function in image.split("Function : ")[1:]:
            found[function.split(maxsplit=1)[0], architecture] = function
    return found


def instructions_of(text):
    instructions, lines = [], text.splitlines()
    for at, line in enumerate(lines):
        if not (match := LINE.match(line)):
            continue
        address, inverse, guard, opcode, operands, lower = match.groups()
        upper = UPPER.match(lines[at + 1])
        if not upper:
            raise ValueError(f"instruction at 0x{address}: no upper 64 bits; use cuobjdump --dump-sass of CUDA 12 or 13")
        base, *parts = opcode.split(".")
        text = (f"@{inverse}{guard} " if guard else "") + f"{opcode} {operands}".strip()
        instructions.append(Instruction(
            int(address, 16), operand_of(inverse + guard) if guard else None, base, tuple(parts),
            tuple(operand_of(part) for part in split_operands(operands)), Control.of(int(upper[1], 16)), text))
    return instructions


def split_operands(text):
    """The operands, split at commas. `R8 0x0` of a return or of a jump by a table has no comma."""
    return [part for part in re.split(r",\s*|(?<=\d)\s+(?=-?0x)", text) if part]
