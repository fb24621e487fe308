"""Instructions of the traced warp that reach beyond a lane: loads, stores, atomics, votes, shuffles and reductions.

Only some lanes are traced, and no other warp. Their share in a result is unknown, as floating-point data is.
"""

from . import arithmetic as at
from .listing import ZERO_REGISTER
from .operands import Operands
from .width import REGISTERS, STORES, destinations, sources

MEMORY = {"LDG", "LD", "LDS", "ATOM", "ATOMG", "ATOMS"} | STORES


class Exchange(Operands):
    def __init__(self, constants, memory):
        super().__init__(constants)
        self.memory, self.shared = memory, {}

    def access(self, instruction, lanes):
        """Loads and stores. Shared memory belongs to the block: places that this warp did not write are unknown."""
        memory = next(operand for operand in instruction.operands if operand.kind == "memory")
        is_shared = instruction.opcode in ("LDS", "STS", "ATOMS", "REDS")
        parts, region = instruction.parts, "shared" if is_shared else ""
        words = 4 if "128" in parts else 2 if "64" in parts else 1
        size = 1 if {"U8", "S8"} & set(parts) else 2 if {"U16", "S16"} & set(parts) else 4 * words
        outputs = destinations(instruction)
        for lane in lanes:
            address = self.address(lane, memory.terms)
            if isinstance(address, str):
                raise ValueError(f"the address depends on {address}")
            if not is_shared:
                region = self.memory.region(address, size)[1]
            for k in range(words):
                place = (address + 4 * k, min(size, 4))
                if instruction.opcode.startswith("LD"):
                    value = self.shared.get(place, at.FLOAT) if is_shared else self.memory.read(*place)
                    if outputs[0].number not in (ZERO_REGISTER,):
                        lane.registers[outputs[0].number + k] = value
                elif instruction.opcode.startswith("ST"):
                    value = self.word(lane, instruction.operands[-1], k)
                    if is_shared:
                        self.shared[place] = value
                    else:
                        self.memory.write(*place, value)
                else:
                    self.memory.write(*place, at.FLOAT)
                    for operand in outputs:
                        self.set(lane, operand, "the result of an atomic operation", 1)
        return region

    def across_R2UR(self, instruction, lanes):
        for operand in destinations(instruction)[:1]:
            self.set(lanes[0], operand, self.word(lanes[0], sources(instruction)[-1]))

    def across_VOTE(self, instruction, lanes):
        """Of ANY and ALL; a ballot is of the traced lanes alone, so it only says whether it is zero."""
        source = sources(instruction)[0]
        votes = [self.predicate(lane, source) for lane in lanes]
        kind = "OR" if "ANY" in instruction.parts else "AND"
        result = votes[0]
        for vote in votes[1:]:
            result = at.combine(kind, result, vote)
        for operand in destinations(instruction):
            ballot = at.unknown_of(*votes) or sum(1 << lane.number for lane, vote in zip(lanes, votes) if vote)
            for lane in lanes:
                self.set(lane, operand, ballot if operand.kind in REGISTERS else result)

    across_VOTEU = across_VOTE

    def across_REDUX(self, instruction, lanes):
        values = [self.word(lane, sources(instruction)[0]) for lane in lanes]
        kind = max if "MAX" in instruction.parts else min if "MIN" in instruction.parts else None
        result = at.unknown_of(*values) or (kind(values) if kind else "the result of REDUX")
        self.set(lanes[0], instruction.operands[0], result)

    across_CREDUX = across_REDUX

    def across_SHFL(self, instruction, lanes):
        """Partners are mostly lanes that are not traced."""
        for lane in lanes:
            value = self.word(lane, sources(instruction)[0])
            self.set(lane, instruction.operands[0], True)
            self.set(lane, instruction.operands[1], value if isinstance(value, str) else at.FLOAT)
