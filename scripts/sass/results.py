"""Runs an instruction in the lanes of the traced warp: reads the operands' values, calls its function, and writes its
results.

A result is computed once if no lane has separate operands. width.py decides which operands an instruction reads and
writes, so values and dependences agree.
"""

from dataclasses import replace
from functools import cache

from . import arithmetic as at
from .compute import make_FSETP, maker_of
from .exchange import MEMORY, NOWHERE, Exchange
from .listing import TRUE_PREDICATE
from .width import FLOATING, PREDICATES, destinations, read, result_words, source_words, sources

LANE_REGISTERS = {"SR_TID.X": "thread", "SR_LANEID": "number"}
ZEROS = ("SR_CTAID.X", "SR_TID.Y", "SR_TID.Z", "SR_CgaCtaId", "SRZ")


@cache
def plan(instruction):
    """The properties of an instruction that every execution needs: its function, its operands, and whether the warp
    has one result.
    """
    maker = maker_of(instruction.opcode)
    outputs, inputs = destinations(instruction), sources(instruction)
    is_float = maker is make_FSETP  # which has the signs from the operands itself
    operands = [(replace(operand, negative=False) if is_float and operand.kind not in PREDICATES else operand,
                 source_words(instruction, operand)) for operand in inputs]
    is_uniform = any(operand.kind in ("UR", "UP") for operand in outputs)
    reason = at.FLOAT if instruction.opcode in FLOATING else f"the result of {instruction.opcode}"
    return maker and maker(instruction), outputs, operands, result_words(instruction), is_uniform, [reason] * len(outputs)


class Results(Exchange):
    def execute(self, instruction, lanes, guards):
        """`guards` is one value for all lanes, or a list. Returns the memory that the instruction touches."""
        if instruction.opcode in MEMORY:
            return self.access(instruction, lanes)
        if special := getattr(self, f"across_{instruction.opcode}", None):
            special(instruction, lanes)
            return NOWHERE
        compute, outputs, operands, words, is_uniform, unknown = plan(instruction)
        if compute is None:
            results = unknown
        elif is_uniform or self.varying.isdisjoint(read(instruction)):
            results = compute(*(self.value(lanes[0], operand, width) for operand, width in operands))
        else:
            rows = zip(*(self.column(lanes, operand, width) for operand, width in operands))
            results = [list(values) for values in zip(*(compute(*row) for row in rows))]
        for operand, values in zip(outputs, results):
            if not isinstance(guards, list):
                self.set(lanes, operand, values, words, guards)
                continue
            for position, lane in enumerate(lanes):
                value = values[position] if isinstance(values, list) else values
                self.set([lane], operand, value, words, guards[position])
        return NOWHERE

    def column(self, lanes, operand, words):
        """The values of an operand by lane."""
        if operand.kind == "R" and operand.is_plain and words == 1:
            return [lane.registers[operand.number] for lane in lanes]
        if operand.kind in ("R", "P"):
            return [self.value(lane, operand, words) for lane in lanes]
        return [self.value(lanes[0], operand, words)] * len(lanes)

    # Instructions that read more than their operands.

    def across_S2R(self, instruction, lanes):
        name = sources(instruction)[0].text
        if name in LANE_REGISTERS:
            values = [getattr(lane, LANE_REGISTERS[name]) for lane in lanes]
        else:
            values = 0 if name in ZEROS else f"the special register {name}"
        self.set(lanes, instruction.operands[0], values)

    across_S2UR = across_S2R

    def across_P2R(self, instruction, lanes):
        """Writes predicates into the bits of a register. Bits outside the mask keep the register's value."""
        source, mask = sources(instruction)[1:3]
        values = []
        for lane in lanes:
            (bits, known), reason = at.bits_of(self.word(lane, source)), at.unknown_of(*lane.predicates)
            for k, value in enumerate(lane.predicates[:TRUE_PREDICATE]):
                if mask.number >> k & 1:
                    bits = bits & ~(1 << k) | (value is True) << k
                    known = known & ~(1 << k) | (not isinstance(value, str)) << k
            values.append(at.word_of(bits, known, reason))
        self.set(lanes, instruction.operands[0], values)

    def across_R2P(self, instruction, lanes):
        """Writes the bits of a register that a mask selects into predicates."""
        source, mask = instruction.operands[1:3]
        for k in range(TRUE_PREDICATE):
            if mask.number >> k & 1:
                pairs = [(self.word(lane, source), at.bits_of(self.word(lane, source))) for lane in lanes]
                values = [bool(bits >> k & 1) if known >> k & 1 else str(word) for word, (bits, known) in pairs]
                self.write(lanes, "P", k, self.shared_by(values))
