"""Reads and writes the operands of an instruction in one lane of the traced warp.

A register holds an integer of 32 bits or the reason why it is not known (arithmetic.py). Uniform registers belong to
the warp. A register that nothing has written is 0, because the compiler sets single bits of some registers before their
first use.
"""

from . import arithmetic as at
from .listing import TRUE_PREDICATE, ZERO_REGISTER, ZERO_UNIFORM
from .width import PREDICATES

LAST = {"R": ZERO_REGISTER, "UR": ZERO_UNIFORM, "P": TRUE_PREDICATE, "UP": TRUE_PREDICATE}  # constants: zero, true

HALVES = {"H0_H0": (0, 16), "H1_H1": (16, 16), "H0": (0, 16), "H1": (16, 16), "B0": (0, 8), "B1": (8, 8), "B2": (16, 8),
          "B3": (24, 8)}


class Lane:
    def __init__(self, thread, number):
        self.thread, self.number = thread, number
        self.registers = [0] * (ZERO_REGISTER + 1)
        self.predicates = [False] * TRUE_PREDICATE + [True]


class Operands:
    """The part of a warp that has registers and constants."""

    def __init__(self, constants):
        self.constants = constants  # bytes by bank and offset
        self.uniform = [0] * (ZERO_UNIFORM + 1)
        self.uniform_predicates = [False] * TRUE_PREDICATE + [True]
        self.alive = 0  # lanes that have not ended
        self.varying = set()  # registers and predicates, as ("R", 4), that may differ between lanes

    def word(self, lane, operand, more=0):
        """32 bits of an operand; of a wide operand, word number `more`."""
        kind = operand.kind
        if kind == "R":
            value = 0 if operand.number == ZERO_REGISTER else lane.registers[operand.number + more]
        elif kind == "number":
            return operand.number >> 32 * more & at.MASK
        elif kind == "UR":
            value = 0 if operand.number == ZERO_UNIFORM else self.uniform[operand.number + more]
        elif kind == "constant":
            value = self.constant(lane, operand, 4 * more)
        else:
            raise ValueError(f"operand {operand.text} is not an integer")
        if isinstance(value, str):
            return value
        if operand.half:
            first, bits = HALVES[operand.half]
            value = value >> first & (1 << bits) - 1
        return ~value & at.MASK if operand.inverse else value

    def value(self, lane, operand, words=1):
        """An operand as instructions use it. The negative of b counts as 2^32 - b. A sum with it has a carry if nothing
        was borrowed. The instruction itself handles the sign of floating-point operands."""
        if operand.kind in PREDICATES:
            return self.predicate(lane, operand)
        if operand.kind in ("other", "special"):
            bits = at.float_bits(operand.text, words == 2)
            return at.FLOAT if bits is None else bits
        if words == 1:
            value = self.word(lane, operand)
        else:
            values = [self.word(lane, operand, k) for k in range(words)]
            value = at.unknown_of(*values)
            value = sum(value << 32 * k for k, value in enumerate(values)) if value is None else value
        return value if isinstance(value, str) or not operand.negative else (1 << 32 * words) - value

    def predicate(self, lane, operand):
        value = lane.predicates[operand.number] if operand.kind == "P" else self.uniform_predicates[operand.number]
        return at.inverse(value) if operand.inverse else value

    def constant(self, lane, operand, more):
        address = self.address(lane, operand.terms)
        if isinstance(address, str):
            return address
        found = [self.constants.get((operand.bank, address + more + k)) for k in range(4)]
        if None in found:
            return f"the driver's constant c[0x{operand.bank:x}][0x{address + more:x}]"
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

    def set(self, lanes, operand, values, words=1, guard=True):
        """Writes a value for each lane, or one value for all of these lanes. If the guard is unknown, the old value may
        stay.
        """
        if operand.number == LAST[operand.kind]:
            return
        if operand.kind in PREDICATES:
            self.write(lanes, operand.kind, operand.number, self.shared_by(values), guard)
            return
        for k in range(words):
            if isinstance(values, list):
                word = [value if isinstance(value, str) else value >> 32 * k & at.MASK for value in values]
            else:
                word = values if isinstance(values, str) else values >> 32 * k & at.MASK
            self.write(lanes, operand.kind, operand.number + k, self.shared_by(word), guard)

    @staticmethod
    def shared_by(values):
        """The value of all lanes if they have the same."""
        if not isinstance(values, list) or values.count(values[0]) < len(values) or isinstance(values[0], at.Partly):
            return values
        return values[0]

    def write(self, lanes, kind, number, word, guard=True):
        if kind in ("UR", "UP"):
            file = self.uniform if kind == "UR" else self.uniform_predicates
            file[number] = word if guard is True else at.merged(file[number], word, guard)
            return
        if guard is True and not isinstance(word, list):
            if len(lanes) == self.alive:
                self.varying.discard((kind, number))
            else:
                self.varying.add((kind, number))
            if kind == "R":
                for lane in lanes:
                    lane.registers[number] = word
            else:
                for lane in lanes:
                    lane.predicates[number] = word
            return
        if isinstance(word, list):
            self.varying.add((kind, number))
        for position, lane in enumerate(lanes):
            value = word[position] if isinstance(word, list) else word
            values = lane.registers if kind == "R" else lane.predicates
            values[number] = value if guard is True else at.merged(values[number], value, guard)
