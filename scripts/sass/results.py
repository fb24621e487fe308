"""What each instruction leaves in the registers and predicates of a lane.

An opcode without a method here leaves unknown values, with its name as the reason; a kernel that decides by one is
refused. Which operands are results comes from width.py, so that values and dependences agree.
"""

from . import arithmetic as at
from .exchange import MEMORY, Exchange
from .listing import TRUE_PREDICATE
from .width import FLOATING, PREDICATES, REGISTERS, destinations, result_words, sources

# Operations on uniform registers that are those on a lane's, by another name.
SAME = {"UIADD3": "IADD3", "VIADD": "IADD3", "IADD": "IADD3", "UMOV": "MOV", "UISETP": "ISETP", "ULEA": "LEA", "ULOP3": "LOP3",
        "USHF": "SHF", "USEL": "SEL", "UIMAD": "IMAD", "UPRMT": "PRMT", "UPLOP3": "PLOP3", "FSEL": "SEL", "ULDC": "LDC",
        "LDCU": "LDC", "IMNMX": "VIMNMX", "UVIMNMX": "VIMNMX", "UFSETP": "FSETP", "DSETP": "FSETP", "VIMNMX3": "VIMNMX"}


class Results(Exchange):
    def execute(self, instruction, lanes, guards):
        """Runs an instruction in these lanes; returns the region of memory that it touches."""
        if instruction.opcode in MEMORY:
            return self.access(instruction, lanes)
        if across := getattr(self, f"across_{instruction.opcode}", None):
            across(instruction, lanes)
            return ""
        opcode = SAME.get(instruction.opcode, instruction.opcode)
        method = getattr(self, f"do_{opcode}", None)
        outputs, inputs, words = destinations(instruction), sources(instruction), result_words(instruction)
        if any(operand.kind in ("UR", "UP") for operand in outputs):
            lanes = lanes[:1]  # once for the warp
        for lane, guard in zip(lanes, guards):
            results = method(lane, instruction, inputs) if method else None
            if results is None:
                reason = at.FLOAT if opcode in FLOATING else f"the result of {instruction.opcode}"
                results = [reason] * len(outputs)
            for operand, value in zip(outputs, results):
                self.set(lane, operand, value, words, guard)
        return ""

    # A result for each of the destinations, or None if it cannot be told.

    def do_MOV(self, lane, instruction, inputs):
        words = result_words(instruction)
        return [self.word(lane, inputs[0]) if words == 1 else self.addend(lane, inputs[0], words)]

    def do_LDC(self, lane, instruction, inputs):
        return [self.constant(lane, inputs[0], 0, 4 * result_words(instruction))]

    def do_CS2R(self, lane, instruction, inputs):
        return [0 if inputs[0].text == "SRZ" else f"the special register {inputs[0].text}"]

    def do_S2R(self, lane, instruction, inputs):
        known = {"SR_TID.X": lane.thread, "SR_LANEID": lane.number, "SR_CTAID.X": 0, "SR_TID.Y": 0, "SR_TID.Z": 0, "SRZ": 0,
                 "SR_CgaCtaId": 0}
        return [known.get(inputs[0].text, f"the special register {inputs[0].text}")]

    do_S2UR = do_S2R

    def do_IADD3(self, lane, instruction, inputs):
        words = result_words(instruction)
        terms = [self.addend(lane, operand, words) for operand in inputs if operand.kind not in PREDICATES]
        carries = [self.predicate(lane, operand) for operand in inputs if operand.kind in PREDICATES]
        if reason := at.unknown_of(*terms, *carries):
            return [reason] * len(destinations(instruction))
        total = sum(terms) + sum(carries)
        over = total >> 32 * words
        return [total & (1 << 32 * words) - 1, over >= 1, over >= 2]

    def do_IMAD(self, lane, instruction, inputs):
        values = [operand for operand in inputs if operand.kind not in PREDICATES]
        carries = [self.predicate(lane, operand) for operand in inputs if operand.kind in PREDICATES]
        is_wide = "WIDE" in instruction.parts
        if "HI" in instruction.parts:
            return None
        a, b = self.addend(lane, values[0]), self.addend(lane, values[1])
        c = self.addend(lane, values[2], 2 if is_wide else 1)
        if reason := at.unknown_of(a, b, c, *carries):
            return [reason] * len(destinations(instruction))
        if is_wide and "U32" not in instruction.parts:
            a, b = at.signed(a & at.MASK), at.signed(b & at.MASK)
        total = a * b + c + sum(carries)
        return [total & (at.WIDE if is_wide else at.MASK), total >> (64 if is_wide else 32) >= 1]

    def do_LEA(self, lane, instruction, inputs):
        carry = [self.predicate(lane, operand) for operand in inputs if operand.kind in PREDICATES]
        values = [operand for operand in inputs if operand.kind not in PREDICATES]
        parts = instruction.parts
        words = [self.addend(lane, operand) for operand in values]
        if reason := at.unknown_of(*words, *carry):
            return [reason] * len(destinations(instruction))
        shift, a, b = words[-1] & 63, words[0], words[1]
        if "HI" in parts:
            high = words[2] if len(words) > 3 else (at.MASK if a >> 31 & 1 else 0) if "SX32" in parts else 0
            a = ((high & at.MASK) << 32 | a & at.MASK) << shift >> 32 & at.MASK
        else:
            a = a << shift & at.MASK
        total = a + b + sum(carry)
        return [total & at.MASK, total >> 32 >= 1]

    def do_SHF(self, lane, instruction, inputs):
        a, count, c = (self.word(lane, operand) for operand in inputs[:3])
        return [at.unknown_of(a, count, c) or at.shifted(instruction.parts, a, count, c)]

    def do_LOP3(self, lane, instruction, inputs):
        result = at.table_of_words(inputs[3].number, [self.word(lane, operand) for operand in inputs[:3]])
        if destinations(instruction)[0].kind in REGISTERS:
            return [result]
        return [at.combine("OR", at.is_nonzero(result), self.predicate(lane, inputs[4])), result]

    def do_PLOP3(self, lane, instruction, inputs):
        bits = [self.predicate(lane, operand) for operand in inputs[:3]]
        luts = [operand.number for operand in inputs[3:5]]
        # An unknown input matters only if the function depends on it.
        results = []
        for lut in luts:
            free = [k for k, bit in enumerate(bits) if isinstance(bit, str)]
            seen = set()
            for choice in range(1 << len(free)):
                given = [int(bit) if not isinstance(bit, str) else choice >> free.index(k) & 1 for k, bit in enumerate(bits)]
                seen.add(bool(at.table(lut, *given, 1)))
            results.append(seen.pop() if len(seen) == 1 else at.unknown_of(*bits))
        return results

    def do_PRMT(self, lane, instruction, inputs):
        a, selector, c = (self.word(lane, operand) for operand in inputs[:3])
        return [at.unknown_of(a, selector, c) or at.permuted(a, selector, c)]

    def do_SEL(self, lane, instruction, inputs):
        words = result_words(instruction)
        which = self.predicate(lane, inputs[2])
        if isinstance(which, str):
            return [which]
        chosen = inputs[0] if which else inputs[1]
        if chosen.kind == "other" or instruction.opcode == "FSEL" and chosen.negative:
            return [at.FLOAT]
        return [self.addend(lane, chosen, words)]

    def do_VIMNMX(self, lane, instruction, inputs):
        values = [self.addend(lane, operand) for operand in inputs[:-1]]
        smallest = self.predicate(lane, inputs[-1])
        if reason := at.unknown_of(smallest, *values):
            return [reason] * len(destinations(instruction))
        key = None if "U32" in instruction.parts else at.signed
        return [(min if smallest else max)((value & at.MASK for value in values), key=key)]

    def do_VIADDMNMX(self, lane, instruction, inputs):
        a, b, c = (self.addend(lane, operand) for operand in inputs[:3])
        smallest = self.predicate(lane, inputs[3])
        if reason := at.unknown_of(a, b, c, smallest):
            return [reason]
        key = None if "U32" in instruction.parts else at.signed
        return [(min if smallest else max)(a + b & at.MASK, c & at.MASK, key=key)]

    def do_ISETP(self, lane, instruction, inputs):
        """With EX this compares the upper words, and the last predicate has the result of the lower ones."""
        kind, parts = instruction.parts[0], instruction.parts
        bits = 64 if {"U64", "S64"} & set(parts) else 32
        a, b = (self.addend(lane, operand, bits // 32) for operand in inputs[:2])
        result = at.unknown_of(a, b)
        if result is None:
            a, b = a & (1 << bits) - 1, b & (1 << bits) - 1
            if not {"U32", "U64"} & set(parts):
                a, b = at.signed(a, bits), at.signed(b, bits)
            if "EX" in parts:
                low = self.predicate(lane, inputs[3])
                result = at.compare(kind, a, b) if a != b else low
            else:
                result = at.compare(kind, a, b)
        joined = parts[-2] if parts[-1] == "EX" else parts[-1]
        more = self.predicate(lane, inputs[2])
        return [at.combine(joined, result, more), at.combine(joined, at.inverse(result), more)]

    def do_FSETP(self, lane, instruction, inputs):
        """Known only where both sides are: a count of ranks, a flag that is stored as a number."""
        is_double = instruction.opcode == "DSETP"
        values = [self.number(lane, operand, is_double) for operand in inputs[:2]]
        result = at.unknown_of(*values) or at.float_compare(instruction.parts[0], *values)
        more = self.predicate(lane, inputs[2])
        joined = instruction.parts[-1]
        return [at.combine(joined, result, more), at.combine(joined, at.inverse(result), more)]

    def do_HFMA2(self, lane, instruction, inputs):
        """-0 * 0 + two halves is how the compiler writes a constant."""
        if [operand.text for operand in inputs[:2]] != ["-RZ", "RZ"]:
            return [at.FLOAT]
        return [at.half_bits(inputs[2].text) << 16 | at.half_bits(inputs[3].text)]

    def do_P2R(self, lane, instruction, inputs):
        mask = inputs[2].number
        (bits, known), reason = at.bits_of(self.word(lane, inputs[1])), at.unknown_of(*lane.predicates)
        for k, value in enumerate(lane.predicates[:TRUE_PREDICATE]):
            if mask >> k & 1:
                bits = bits & ~(1 << k) | (value is True) << k
                known = known & ~(1 << k) | (not isinstance(value, str)) << k
        return [at.word_of(bits, known, reason)]
