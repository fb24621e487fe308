"""The results of integer instructions on values that may be unknown.

A value is an integer of 32 bits, or a text: the reason why it is not known. Floating point is not computed, because
only its speed matters: its results are FLOAT. A decision must not depend on a value that is unknown for any other
reason.
"""

import operator, struct

COMPARE = {"EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge}
MASK, WIDE = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
FLOAT = "floating-point data"


class Partly(str):
    """An unknown value some of whose bits are known: the compiler keeps predicates in the bits of a register."""

    def __new__(cls, reason, bits, known):
        value = super().__new__(cls, reason)
        value.bits, value.known = bits & known, known
        return value


def unknown_of(*values):
    """The most important reason among these values, or None if all are known."""
    reason = None
    for value in values:
        if isinstance(value, str) and (reason is None or reason == FLOAT):
            reason = value
    return reason if reason is None else str(reason)


def bits_of(value):
    """The bits of a word, and which of them are known."""
    if isinstance(value, str):
        return getattr(value, "bits", 0), getattr(value, "known", 0)
    return value, MASK


def word_of(bits, known, reason):
    return bits & MASK if known & MASK == MASK else Partly(reason, bits, known) if known else str(reason)


def merged(old, new, reason):
    """One of two values, chosen by a predicate that is not known."""
    if isinstance(old, bool) or isinstance(new, bool):
        return old if old is new else str(reason)
    (old, known_old), (new, known_new) = bits_of(old), bits_of(new)
    return word_of(old, known_old & known_new & ~(old ^ new), reason)


def signed(value, bits=32):
    return value - (1 << bits) if value >> bits - 1 & 1 else value


def compare(kind, a, b):
    return COMPARE[kind](a, b)


def combine(kind, a, b):
    """AND, OR, XOR of predicates. A known predicate may determine the result."""
    if kind == "AND":
        return False if a is False or b is False else unknown_of(a, b) or (a and b)
    if kind == "OR":
        return True if a is True or b is True else unknown_of(a, b) or (a or b)
    return unknown_of(a, b) or a != b


def inverse(value):
    return value if isinstance(value, str) else not value


def table(lut, a, b, c, width):
    """A function of three bits, for each bit: bit 4a + 2b + c of `lut`."""
    result, mask = 0, (1 << width) - 1
    for k in range(8):
        if lut >> k & 1:
            result |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c) & mask
    return result


def table_of_words(lut, words):
    """`table` of three words of which bits may be unknown."""
    reason = unknown_of(*words)
    if reason is None:
        return table(lut, *words, 32)
    pairs = [bits_of(word) for word in words]
    always, ever = MASK, 0
    for choice in range(8):
        given = [bits | (~known & MASK if choice >> k & 1 else 0) for k, (bits, known) in enumerate(pairs)]
        result = table(lut, *given, 32)
        always, ever = always & result, ever | result
    return word_of(always, always | ~ever & MASK, reason)


def is_nonzero(word):
    if not isinstance(word, str):
        return word != 0
    return True if bits_of(word)[0] else str(word)


def permuted(a, selector, c):
    """PRMT: four bytes of c:a; bit 3 of a selector replicates the byte's sign."""
    whole, result = c << 32 | a, 0
    for k in range(4):
        pick = selector >> 4 * k & 15
        byte = whole >> 8 * (pick & 7) & 255
        result |= (0xFF if byte & 128 else 0) << 8 * k if pick & 8 else byte << 8 * k
    return result


def shifted(parts, a, count, c):
    """SHF: a funnel shift of c:a, or a shift of only one of its words."""
    wide = "U64" in parts or "S64" in parts
    count = min(count, 64 if wide else 32) if "W" not in parts else count & (63 if wide else 31)
    whole = c << 32 | a
    if parts[0] == "L":
        whole <<= count
        return whole >> 32 & MASK if "HI" in parts else whole & MASK
    if "S32" in parts or "S64" in parts:
        whole = signed(whole, 64)
    return whole >> count + (32 if "HI" in parts else 0) & MASK


def float_bits(text, double=False):
    """An immediate of a floating-point instruction as bits, or None."""
    special = {"+INF": "inf", "-INF": "-inf", "+QNAN": "nan", "-QNAN": "-nan", "QNAN": "nan", "INF": "inf"}
    try:
        value = float(special.get(text.strip(), text))
    except ValueError:
        return None
    return int.from_bytes(struct.pack("<d" if double else "<f", value), "little")


def half_bits(text):
    return int.from_bytes(struct.pack("<e", float(text.strip().replace("QNAN", "nan").replace("INF", "inf"))), "little")


def float_compare(kind, a, b):
    """A kind that ends in U is true for NaN. NAN asks whether an operand is NaN, and NUM whether none is."""
    unordered = a != a or b != b
    if kind in ("NAN", "NUM"):
        return unordered == (kind == "NAN")
    if kind.endswith("U") and kind not in ("U",):
        return unordered or compare(kind[:-1], a, b)
    return not unordered and compare(kind, a, b)
