"""Reads and writes the operands of an instruction in one lane of the traced warp.

A register holds an integer of 32 bits or the reason why it is not known (arithmetic.py). Uniform registers are the
warp's. A register that nothing has written is 0: the compiler sets single bits of some before their first use.
"""

import struct

from . import arithmetic as at
from .listing import TRUE_PREDICATE, ZERO_REGISTER, ZERO_UNIFORM
from .width import PREDICATES

HALVES = {"H0_H0": (0, 16), "H1_H1": (16, 16), "H0": (0, 16), "H1": (16, 16), "B0": (0, 8), "B1": (8, 8), "B2": (16, 8),
          "B3": (24, 8)}


class Lane:
    def __init__(self, thread, number):
        self.thread, self.number, self.pc, self.waits_for = thread, number, 0, None
        self.registers = [0] * (ZERO_REGISTER + 1)
        self.predicates = [False] * TRUE_PREDICATE + [True]


class Operands:
    """The part of a warp that has registers and constants."""

    def __init__(self, constants):
        self.constants = constants  # bank 0, bytes by offset
        self.uniform = [0] * (ZERO_UNIFORM + 1)
        self.uniform_predicates = [False] * TRUE_PREDICATE + [True]

    def word(self, lane, operand, more=0):
        """32 bits of an operand, the `more`-th word of a wide one."""
        kind = operand.kind
        if kind == "R":
            value = 0 if operand.number == ZERO_REGISTER else lane.registers[operand.number + more]
        elif kind == "number":
            return operand.number >> 32 * more & at.MASK
        elif kind == "UR":
            value = 0 if operand.number == ZERO_UNIFORM else self.uniform[operand.number + more]
        elif kind == "constant":
            value = self.constant(lane, operand, 4 * more, 4)
        elif kind == "special":
            value = 0
        else:
            raise ValueError(f"operand {operand.text} is not an integer")
        if isinstance(value, str):
            return value
        if operand.half:
            first, bits = HALVES[operand.half]
            value = value >> first & (1 << bits) - 1
        return ~value & at.MASK if operand.inverse else value

    def addend(self, lane, operand, words=1):
        """An operand of a sum. The negative of b counts as 2^32 - b, so that a carry says that nothing was borrowed."""
        values = [self.word(lane, operand, k) for k in range(words)]
        if reason := at.unknown_of(*values):
            return reason
        value = sum(value << 32 * k for k, value in enumerate(values))
        return (1 << 32 * words) - value if operand.negative else value

    def predicate(self, lane, operand):
        value = lane.predicates[operand.number] if operand.kind == "P" else self.uniform_predicates[operand.number]
        return at.inverse(value) if operand.inverse else value

    def constant(self, lane, operand, more, size):
        """Constants of other banks are the compiler's literals, which only floating point has here."""
        address = self.address(lane, operand.terms)
        if isinstance(address, str) or operand.bank != 0:
            return at.FLOAT if operand.bank != 0 else address
        found = [self.constants.get(address + more + k) for k in range(size)]
        if None in found:
            return f"the driver's constant c[0x0][0x{address + more:x}]"
        return int.from_bytes(bytes(found), "little")

    def address(self, lane, terms):
        total = 0
        for kind, number, words, factor in terms:
            if kind == "number":
                total += number
                continue
            if number == (ZERO_REGISTER if kind == "R" else ZERO_UNIFORM):
                continue
            values = [lane.registers[number + k] if kind == "R" else self.uniform[number + k] for k in range(words)]
            if reason := at.unknown_of(*values):
                return reason
            total += sum(value << 32 * k for k, value in enumerate(values)) * factor
        return total & at.WIDE

    def set(self, lane, operand, value, words=1, guard=True):
        """With a guard that is not known, the old value may stay."""
        if operand.kind in PREDICATES:
            if operand.number != TRUE_PREDICATE:
                file = lane.predicates if operand.kind == "P" else self.uniform_predicates
                file[operand.number] = value if guard is True else at.merged(file[operand.number], value, guard)
        elif operand.number != (ZERO_REGISTER if operand.kind == "R" else ZERO_UNIFORM):
            file = lane.registers if operand.kind == "R" else self.uniform
            for k in range(words):
                word = value if isinstance(value, str) else value >> 32 * k & at.MASK
                file[operand.number + k] = word if guard is True else at.merged(file[operand.number + k], word, guard)

    def number(self, lane, operand, is_double):
        if operand.kind in ("other", "number"):
            bits = at.float_bits(operand.text, is_double)
        else:
            words = [self.word(lane, operand, k) for k in range(2 if is_double else 1)]
            if reason := at.unknown_of(*words):
                return reason
            bits = sum(word << 32 * k for k, word in enumerate(words))
        value = struct.unpack("<d" if is_double else "<f", bits.to_bytes(8 if is_double else 4, "little"))[0]
        value = abs(value) if operand.magnitude or operand.text.startswith(("|", "-|")) else value
        return -value if operand.negative else value
