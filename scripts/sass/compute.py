"""Makes a function of the operands' values for each integer instruction.

A function takes the operands that the instruction reads, in order, and returns a result for each operand that it
writes. Values are integers or reasons why they are not known (arithmetic.py). An instruction for which no function can
be made leaves unknown values with its name as the reason. A kernel that decides by such a value is refused.
"""

import struct

from . import arithmetic as at
from .width import PREDICATES, REGISTERS, destinations, result_words, sources

# Uniform registers, and variants whose difference is in the operands, have their functions under another name.
SAME = {"UIADD3": "IADD3", "VIADD": "IADD3", "IADD": "IADD3", "UMOV": "MOV", "UISETP": "ISETP", "ULEA": "LEA", "ULOP3": "LOP3",
        "USHF": "SHF", "USEL": "SEL", "UIMAD": "IMAD", "UPRMT": "PRMT", "UPLOP3": "PLOP3", "FSEL": "SEL", "ULDC": "MOV",
        "LDC": "MOV", "LDCU": "MOV", "IMNMX": "VIMNMX", "UVIMNMX": "VIMNMX", "UFSETP": "FSETP", "DSETP": "FSETP",
        "VIMNMX3": "VIMNMX"}


def numbers_of(instruction):
    """How many of the operands are numbers; predicates follow them."""
    return sum(operand.kind not in PREDICATES for operand in sources(instruction))


def make_MOV(instruction):
    return lambda value: [value]


def make_CS2R(instruction):
    text = sources(instruction)[0].text
    return lambda _: [0 if text == "SRZ" else f"the special register {text}"]


def make_IADD3(instruction):
    bits, results = 32 * result_words(instruction), len(destinations(instruction))

    def compute(*values):
        if reason := at.unknown_of(*values):
            return [reason] * results
        total = sum(values)  # a carry counts as 1
        return [total & (1 << bits) - 1, total >> bits >= 1, total >> bits >= 2][:results]

    return compute


def make_IMAD(instruction):
    if "HI" in instruction.parts:
        return None
    is_wide, results = "WIDE" in instruction.parts, len(destinations(instruction))
    is_signed, bits = is_wide and "U32" not in instruction.parts, 64 if is_wide else 32

    def compute(a, b, c, *carries):
        if reason := at.unknown_of(a, b, c, *carries):
            return [reason] * results
        if is_signed:
            a, b = at.signed(a & at.MASK), at.signed(b & at.MASK)
        total = a * b + c + sum(carries)
        return [total & (1 << bits) - 1, total >> bits >= 1][:results]

    return compute


def make_LEA(instruction):
    count, parts, results = numbers_of(instruction), instruction.parts, len(destinations(instruction))

    def compute(*values):
        if reason := at.unknown_of(*values):
            return [reason] * results
        a, b, shift = values[0] & at.MASK, values[1], values[count - 1] & 63
        if "HI" in parts:
            high = values[2] & at.MASK if count > 3 else at.MASK if "SX32" in parts and a >> 31 else 0
            a = (high << 32 | a) << shift >> 32
        else:
            a <<= shift
        total = (a & at.MASK) + b + sum(values[count:])
        return [total & at.MASK, total >> 32 >= 1][:results]

    return compute


def make_SHF(instruction):
    parts = instruction.parts
    return lambda a, count, c: [at.unknown_of(a, count, c) or at.shifted(parts, a, count, c)]


def make_LOP3(instruction):
    has_predicate = destinations(instruction)[0].kind not in REGISTERS

    def compute(a, b, c, lut, more):
        result = at.table_of_words(lut, (a, b, c))
        return [at.combine("OR", at.is_nonzero(result), more), result] if has_predicate else [result]

    return compute


def make_PLOP3(instruction):
    def one(lut, bits):
        """An unknown input matters only if the function depends on it."""
        free = [k for k, bit in enumerate(bits) if isinstance(bit, str)]
        seen = {bool(at.table(lut, *(choice >> free.index(k) & 1 if k in free else int(bit) for k, bit in enumerate(bits)), 1))
                for choice in range(1 << len(free))}
        return seen.pop() if len(seen) == 1 else at.unknown_of(*bits)

    return lambda a, b, c, first, second: [one(first, (a, b, c)), one(second, (a, b, c))]


def make_PRMT(instruction):
    return lambda a, selector, c: [at.unknown_of(a, selector, c) or at.permuted(a, selector, c)]


def make_SEL(instruction):
    is_float = instruction.opcode == "FSEL"
    floats = [is_float and (operand.kind == "other" or operand.negative) for operand in sources(instruction)[:2]]

    def compute(a, b, which):
        if isinstance(which, str):
            return [which]
        return [at.FLOAT if floats[not which] else a if which else b]

    return compute


def make_VIMNMX(instruction):
    key, results = None if "U32" in instruction.parts else at.signed, len(destinations(instruction))

    def compute(*values):
        *values, smallest = values
        if reason := at.unknown_of(smallest, *values):
            return [reason] * results
        return [(min if smallest else max)((value & at.MASK for value in values), key=key), *["VIMNMX"] * (results - 1)]

    return compute


def make_VIADDMNMX(instruction):
    larger = make_VIMNMX(instruction)
    return lambda a, b, c, smallest: larger(at.unknown_of(a, b) or a + b, c, smallest)


def make_ISETP(instruction):
    """With EX this compares the upper words. The last predicate then has the result for the lower words."""
    kind, parts = instruction.parts[0], set(instruction.parts)
    joined = [part for part in instruction.parts if part != "EX"][-1]
    bits = 64 if parts & {"U64", "S64"} else 32
    is_signed, mask = not parts & {"U32", "U64"}, (1 << bits) - 1

    def compute(a, b, more, low=None):
        result = at.unknown_of(a, b)
        if result is None:
            a, b = a & mask, b & mask
            if is_signed:
                a, b = at.signed(a, bits), at.signed(b, bits)
            result = low if a == b and low is not None else at.compare(kind, a, b)
        return [at.combine(joined, result, more), at.combine(joined, at.inverse(result), more)]

    return compute


def make_FSETP(instruction):
    """The result is known only if both inputs are known. A count of ranks is an example, and so is a flag that is
    stored as a number.
    """
    kind, joined, form = instruction.parts[0], instruction.parts[-1], "<d" if instruction.opcode == "DSETP" else "<f"
    operands = sources(instruction)[:2]

    def number(operand, value):
        if isinstance(value, str):
            return value
        value = struct.unpack(form, (value & (1 << 8 * struct.calcsize(form)) - 1).to_bytes(struct.calcsize(form), "little"))[0]
        value = abs(value) if operand.magnitude else value
        return -value if operand.negative else value

    def compute(a, b, more):
        result = at.unknown_of(a, b) or at.float_compare(kind, number(operands[0], a), number(operands[1], b))
        return [at.combine(joined, result, more), at.combine(joined, at.inverse(result), more)]

    return compute


def make_HFMA2(instruction):
    """The compiler writes a constant as -0 * 0 + two halves."""
    texts = [operand.text for operand in sources(instruction)]
    if texts[:2] != ["-RZ", "RZ"]:
        return lambda *_: [at.FLOAT]
    constant = at.half_bits(texts[2]) << 16 | at.half_bits(texts[3])
    return lambda *_: [constant]


def maker_of(opcode):
    return globals().get(f"make_{SAME.get(opcode, opcode)}")
