"""Which registers and predicates an instruction writes and reads, and how many words of each.

Values (results.py) and dependences (dependence.py) take both from here.
"""

import re
from functools import cache

from .listing import TRUE_PREDICATE, ZERO_REGISTER, ZERO_UNIFORM

STORES = {"STG", "ST", "STS", "RED", "REDG", "REDS"}
COPIES = {"LDGSTS"}
LOADS = {"LDG", "LD", "LDS", "ATOM", "ATOMG", "ATOMS"}
CONSTANT_LOADS = {"LDC", "ULDC", "LDCU"}
FLOW = {"BRA", "BRX", "BRXU", "BSSY", "BSYNC", "BREAK", "EXIT", "CALL", "RET", "BAR", "WARPSYNC", "NOP", "MEMBAR", "ERRBAR",
        "CGAERRBAR", "CCTL", "DEPBAR", "LDGDEPBAR", "YIELD", "NANOSLEEP"}
COMPARISONS = {"ISETP", "UISETP", "FSETP", "UFSETP", "DSETP", "PLOP3", "UPLOP3", "HSETP2"}
# Floating-point arithmetic and conversions, whose results are not computed.
FLOATING = {"FADD", "FMUL", "FFMA", "MUFU", "DADD", "DMUL", "DFMA", "F2F", "F2FP", "I2F", "I2FP", "F2I", "F2IP", "HADD2",
            "HMUL2", "HFMA2", "FMNMX", "FMNMX3", "FCHK", "FRND", "FADD2", "FMUL2", "FFMA2", "UI2F", "UF2F", "UFADD", "UFMUL",
            "UFFMA", "UI2FP", "UF2I", "FSWZADD"}
DOUBLE = {"DADD", "DMUL", "DFMA", "DSETP", "DMNMX"}
MAY_BE_WIDE = {"IADD", "IADD3", "UIADD3", "MOV", "UMOV", "SEL", "USEL", "ISETP", "UISETP", "LEA", "ULEA", "LOP3", "ULOP3"}
REGISTERS, PREDICATES = ("R", "UR"), ("P", "UP")


@cache
def is_wide(instruction):
    """Whether an instruction usually has operands of 64 bits: f64, and integers that say so."""
    return instruction.opcode in DOUBLE or instruction.opcode in MAY_BE_WIDE and bool(
        {"64", "U64", "S64"} & set(instruction.parts))


@cache
def result_words(instruction):
    opcode, parts = instruction.opcode, instruction.parts
    if opcode in LOADS | CONSTANT_LOADS:
        return memory_words(instruction)[0]
    if opcode == "CS2R":
        return 1 if "32" in parts else 2
    if opcode in ("F2F", "I2F", "F2I", "UI2F") and parts:
        kinds = [part for part in parts if re.fullmatch(r"[FSU]\d+|BF16", part)]  # of the result, then of the source
        return 2 if kinds and kinds[0] in ("F64", "S64", "U64") else 1
    return 2 if "WIDE" in parts or is_wide(instruction) else 1


@cache
def memory_words(instruction):
    """Registers of a load or store, and the bytes that it accesses."""
    parts = set(instruction.parts)
    words = 4 if "128" in parts else 2 if "64" in parts else 1
    return words, 1 if parts & {"U8", "S8"} else 2 if parts & {"U16", "S16"} else 4 * words


@cache
def destinations(instruction):
    """The operands that an instruction writes, in order."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in STORES | COPIES | FLOW or not operands:
        return ()
    if operands[0].kind in PREDICATES:
        if opcode in ("LOP3", "ULOP3", "SHFL") or opcode in COMPARISONS:
            return operands[:2]
        return operands[:1]
    if operands[0].kind not in REGISTERS:
        return ()
    if opcode in ("VOTE", "VOTEU"):
        return operands[:2]
    count = 1
    while count < len(operands) and operands[count].kind in PREDICATES:
        count += 1
    return operands[:count]


@cache
def sources(instruction):
    return instruction.operands[len(destinations(instruction)) :]


def source_words(instruction, operand):
    opcode, parts = instruction.opcode, instruction.parts
    if opcode in STORES | CONSTANT_LOADS:
        return memory_words(instruction)[0]
    if opcode in ("RET", "BRX", "BRXU"):
        return 2
    if opcode in ("F2F", "F2I") and "F64" in parts[1:] or opcode == "F2F" and parts[-1:] == ("F64",) or \
            opcode == "I2F" and bool({"U64", "S64"} & set(parts)):
        return 2
    if "WIDE" in parts:
        return 2 if operand is instruction.operands[-1] else 1
    return 2 if is_wide(instruction) else 1


def names(operand, words):
    """The registers of an operand, as ("R", 4). The constants zero and true have none."""
    if operand.kind in PREDICATES:
        return [] if operand.number == TRUE_PREDICATE else [(operand.kind, operand.number)]
    if operand.kind in REGISTERS:
        zero = ZERO_REGISTER if operand.kind == "R" else ZERO_UNIFORM
        return [] if operand.number == zero else [(operand.kind, operand.number + k) for k in range(words)]
    found = []
    for kind, number, width, _ in operand.terms:
        if kind != "number" and number != (ZERO_REGISTER if kind == "R" else ZERO_UNIFORM):
            found += [(kind, number + k) for k in range(width)]
    return found


@cache
def written(instruction):
    words = result_words(instruction)
    if instruction.opcode == "R2P":
        return tuple(("P", k) for k in range(TRUE_PREDICATE))
    return tuple(name for operand in destinations(instruction) for name in names(operand, words))


@cache
def read(instruction):
    found = [name for operand in sources(instruction) for name in names(operand, source_words(instruction, operand))]
    if instruction.opcode == "P2R":
        found += [("P", k) for k in range(TRUE_PREDICATE)]
    if instruction.guard is not None:
        found += names(instruction.guard, 1)
    return tuple(found)
