"""Instructions of the traced warp that reach beyond a lane: loads, stores, copies, votes, shuffles and reductions.

No other warp is traced. Shared memory that this warp did not write holds unknown values, as floating-point data does.
"""

from . import arithmetic as at
from .operands import LAST, Operands
from .width import REGISTERS, STORES, destinations, memory_words, sources

MEMORY = {"LDG", "LD", "LDS", "ATOM", "ATOMG", "ATOMS", "LDGSTS"} | STORES
SHARED = {"LDS", "STS", "ATOMS", "REDS"}
NOWHERE = ("", ())


class Exchange(Operands):
    def __init__(self, constants, memory):
        super().__init__(constants)
        self.memory, self.shared = memory, {}  # shared memory by addresses of words

    def access(self, instruction, lanes):
        """Returns the region of device memory or "shared", and the addresses of words in shared memory."""
        places = [operand for operand in instruction.operands if operand.kind == "memory"]
        of_lane = self.varying & {(kind, number + k) for place in places for kind, number, words, _ in place.terms
                                  for k in range(words) if kind != "number"}
        stored = instruction.opcode in STORES and instruction.operands[-1].kind == "R"
        each = lanes if of_lane or stored else lanes[:1]
        addresses = [[self.known_address(lane, place.terms) for lane in each] for place in places]
        words, size = memory_words(instruction)
        if instruction.opcode == "LDGSTS":
            regions = {self.memory.region(address, size)[1] for address in addresses[1]}
            for to, source in zip(*addresses):
                for k in range(words):
                    self.shared[to + 4 * k] = self.memory.read(source + 4 * k, 4)
            return regions.pop(), self.shared_words(addresses[0], words)
        if instruction.opcode in SHARED:
            self.exchange_shared(instruction, lanes, each, addresses[0], words, size)
            return "shared", self.shared_words(addresses[0], words)
        region = [self.memory.region(address, size)[1] for address in addresses[0]][0]
        for k in range(words):
            if instruction.opcode in ("LDG", "LD"):
                values = [self.memory.read(address + 4 * k, min(size, 4)) for address in addresses[0]]
                self.set_word(lanes, instruction, k, values)
            elif instruction.opcode in ("STG", "ST"):
                for lane, address in zip(each, addresses[0]):
                    self.memory.write(address + 4 * k, min(size, 4), self.word(lane, instruction.operands[-1], k))
            else:
                for address in addresses[0]:
                    self.memory.write(address + 4 * k, min(size, 4), at.FLOAT)
                self.set_word(lanes, instruction, k, ["the result of an atomic operation"])
        return region, ()

    def exchange_shared(self, instruction, lanes, each, addresses, words, size):
        for k in range(words):
            if instruction.opcode == "LDS":
                values = [self.shared.get(address + 4 * k & ~3, at.FLOAT) for address in addresses]
                shifts = [8 * (address & 3) if size < 4 else 0 for address in addresses]
                mask = (1 << 8 * min(size, 4)) - 1
                values = [value if isinstance(value, str) else value >> shift & mask for value, shift in zip(values, shifts)]
                self.set_word(lanes, instruction, k, values)
            else:
                for lane, address in zip(each, addresses):
                    value = self.word(lane, instruction.operands[-1], k) if instruction.opcode == "STS" and size >= 4 else at.FLOAT
                    self.shared[address + 4 * k & ~3] = value

    def set_word(self, lanes, instruction, k, values):
        """One word of a load's result: a value for each lane, or one value for all."""
        for operand in destinations(instruction):
            if operand.kind in REGISTERS and operand.number != LAST[operand.kind]:
                word = values[0] if values.count(values[0]) == len(values) else values
                self.write(lanes, operand.kind, operand.number + k, word)

    def known_address(self, lane, terms):
        address = self.address(lane, terms)
        if isinstance(address, str):
            raise ValueError(f"the address depends on {address}")
        return address

    @staticmethod
    def shared_words(addresses, words):
        return tuple(sorted({address + 4 * k & ~3 for address in addresses for k in range(words)}))

    def across_R2UR(self, instruction, lanes):
        for operand in destinations(instruction)[:1]:
            self.set(lanes, operand, self.word(lanes[0], sources(instruction)[-1]))

    def across_VOTE(self, instruction, lanes):
        votes = [self.predicate(lane, sources(instruction)[0]) for lane in lanes]
        kind = "OR" if "ANY" in instruction.parts else "AND"
        result = votes[0]
        for vote in votes[1:]:
            result = at.combine(kind, result, vote)
        ballot = at.unknown_of(*votes) or sum(1 << lane.number for lane, vote in zip(lanes, votes) if vote)
        for operand in destinations(instruction):
            self.set(lanes, operand, ballot if operand.kind in REGISTERS else result)

    across_VOTEU = across_VOTE

    def across_REDUX(self, instruction, lanes):
        values = [self.word(lane, sources(instruction)[0]) for lane in lanes]
        kind = max if "MAX" in instruction.parts else min if "MIN" in instruction.parts else None
        result = at.unknown_of(*values) or (kind(values) if kind else "the result of REDUX")
        self.set(lanes, instruction.operands[0], result)

    across_CREDUX = across_REDUX

    def across_SHFL(self, instruction, lanes):
        """Butterfly shuffles are followed. Other shuffles are followed only for a value that all lanes share."""
        source, distance = sources(instruction)[:2]
        values = {lane.number: self.word(lane, source) for lane in lanes}
        known = set(map(str, values.values()))
        if len(known) == 1:
            results = [values[lane.number] for lane in lanes]
        elif instruction.parts[0] == "BFLY" and distance.kind == "number":
            results = [values.get(lane.number ^ distance.number, at.FLOAT) for lane in lanes]
        else:
            results = ["the result of SHFL"] * len(lanes)
        self.set(lanes, instruction.operands[0], True)
        self.set(lanes, instruction.operands[1], results)
