"""Figures of a trace: the steady round of the element loop, the cost of a run, and the loads before the first element.

A round is one pass of the innermost loop that loads elements. Loops are those of the executed part of the kernel, and
are found by its jumps. The steady round is the last round of the second run that loads as many elements as any round.
"""

from dataclasses import dataclass

from .dependence import chain, is_load, parents_of_loads, waited_loads
from .launch import RUNS
from .listing import BYTES
from .loops import components

BY_REGISTER = ("RET", "BRX", "BRXU")
JUMPS = ("BRA", "CALL", "EXIT", *BY_REGISTER)
CONTROL_STRUCTS = ("control", "records", "tiles", "norms", "shared", "")
STEADY_RUN = 1
UNITS = {
    "fma": {"FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2", "HADD2", "HMUL2", "HFMA2", "IMAD", "IMUL"},
    "alu": {"LOP3", "PLOP3", "IADD", "IADD3", "VIADD", "ISETP", "FSETP", "HSETP2", "SEL", "FSEL", "FMNMX", "FMNMX3", "IMNMX",
            "VIMNMX", "VIMNMX3", "PRMT", "SHF", "SHL", "SHR", "LEA", "F2FP", "I2FP", "IABS", "MOV", "SGXT", "BMSK", "P2R", "R2P"},
    "xu": {"MUFU", "FCHK", "F2F", "I2F", "F2I", "FRND", "POPC", "FLO", "BREV"},
    "fp64": {"DADD", "DMUL", "DFMA", "DSETP", "DMNMX"},
}
FIGURES = ("elements", "instructions", "stalls", "loads", "together", "latencies", "rereads", "tile_instructions", "tile_stalls",
           "first_chain", "tile_chain", "fma", "alu", "xu", "fp64")


@dataclass(frozen=True)
class Figures:
    elements: int  # of a warp in a round
    instructions: int  # issued in a round
    stalls: int  # fixed stall cycles of a round
    loads: int  # of elements in a round
    together: int  # of them issued before the first wait for any of them
    latencies: int  # of memory that a round pays one after the other for its elements
    rereads: int  # loads of control structs in a round
    tile_instructions: int  # issued for a run of tiles outside its rounds
    tile_stalls: int
    first_chain: int  # dependent loads before the first load of an element
    tile_chain: int  # the same, of those that follow the last round of the run before
    fma: int  # instructions of a round by the unit that executes them; others take an issue slot alone
    alu: int
    xu: int
    fp64: int

    def values(self):
        return [getattr(self, name) for name in FIGURES]


def is_element(event):
    return is_load(event) and event.region not in CONTROL_STRUCTS


def graph(events, code):
    """Successors among the executed instructions, including jumps that were not taken.

    A loop that is left after one pass has not executed its jump back. The search therefore follows instructions that
    were not executed up to the next jump that is certain."""
    executed = {event.instruction.address for event in events}

    def first_executed(address):
        seen = set()
        while address in code and address not in executed and address not in seen:
            seen.add(address)
            instruction = code[address]
            if instruction.opcode in JUMPS and (instruction.opcode != "BRA" or is_conditional(instruction)):
                return set()
            address = instruction.target() if instruction.opcode == "BRA" else address + BYTES
        return {address} & executed

    successors = {}
    for event, following in zip(events, [*events[1:], None]):
        instruction = event.instruction
        if instruction.opcode in BY_REGISTER and following:
            successors.setdefault(instruction.address, set()).add(following.instruction.address)
        if instruction.address in successors:
            continue
        to = first_executed(instruction.target()) if instruction.opcode in ("BRA", "CALL") else set()
        if instruction.opcode not in JUMPS or is_conditional(instruction):
            to |= first_executed(instruction.address + BYTES)
        successors[instruction.address] = to
    return successors


def is_conditional(instruction):
    return instruction.guard is not None or instruction.opcode == "BRA" and len(instruction.operands) > 1


def loops(events, code):
    """The loop over runs and the loop over elements, as (head, instructions), outermost first; they may be the same."""
    successors = graph(events, code)
    weight = {}
    for event in events:
        if is_element(event):
            weight[event.instruction.address] = weight.get(event.instruction.address, 0) + 1
    nodes, nest = set(successors), []
    while True:
        rings = [ring for ring in components(nodes, successors) if ring & set(weight)]
        if not rings:
            return nest
        ring = max(rings, key=lambda ring: sum(weight.get(address, 0) for address in ring))
        # The head is where the trace enters the loop.
        head = next(event.instruction.address for event in events if event.instruction.address in ring)
        nest.append((head, ring))
        nodes = ring - {head}


def passes(events, head, ring):
    """Ranges of the trace: from each execution of the head to the next one, or to the end of the loop."""
    found, start = [], None
    for position, event in enumerate(events):
        address = event.instruction.address
        if start is not None and (address == head or address not in ring):
            found.append((start, position))
            start = None
        if address == head:
            start = position
    return found + ([(start, len(events))] if start is not None else [])


def stalls(events):
    return sum(event.instruction.control.stall for event in events)


def together(events, waited, first, last):
    """Element loads of a round, and how many were issued before the first wait for any of them."""
    loads = [position for position in range(first, last) if is_element(events[position])]
    mine = set(loads)
    wait = next((position for position in range(first, len(events)) if mine & set(waited[position])), len(events))
    return len(loads), sum(position < wait for position in loads)


def latencies(events, waited, first, last):
    """The number of a round's waits for elements. The elements were requested after the previous such wait, or before
    the round began.
    """
    issued, phase = {}, 0
    for position in range(first, last):
        for load in waited[position]:
            if is_element(events[load]):
                phase = max(phase, issued.get(load, 0) + 1)
        if is_element(events[position]):
            issued[position] = phase
    return phase


@dataclass(frozen=True)
class Reading:
    figures: Figures
    events: list
    waited: list
    round: tuple


def read_trace(events, code, run_elements, warps):
    waited, parents = waited_loads(events), parents_of_loads(events)
    nest = loops(events, code)
    if not nest:
        raise ValueError("no loop loads elements")
    tiles = passes(events, *nest[0])
    if len(tiles) < RUNS:
        raise ValueError(f"{len(tiles)} passes of the loop over runs, expected {RUNS}")
    start, end = tiles[STEADY_RUN]
    rounds = [(a, b) for a, b in passes(events, *nest[-1]) if start <= a < end]
    rounds = [(a, b) for a, b in rounds if any(is_element(event) for event in events[a:b])]
    loaded = [sum(map(is_element, events[a:b])) for a, b in rounds]
    first, last = [r for r, count in zip(rounds, loaded) if count == max(loaded)][-1]
    loads, count = together(events, waited, first, last)
    outside = [event for position, event in enumerate(events[start:end], start) if not any(a <= position < b for a, b in rounds)]
    elements = [position for position, event in enumerate(events) if is_element(event)]
    between = max(b for a, b in passes(events, *nest[-1]) if b <= start and any(is_element(event) for event in events[a:b]))
    next_first = next(position for position in elements if position >= start)
    return Reading(Figures(
        run_elements // len(rounds) // warps, last - first, stalls(events[first:last]), loads, count,
        latencies(events, waited, first, last), sum(is_load(event) and not is_element(event) for event in events[first:last]),
        len(outside), stalls(outside), chain(parents, elements[0]),
        chain(parents, next_first, between),
        *(sum(event.instruction.opcode in of_unit for event in events[first:last]) for of_unit in UNITS.values())), events, waited, (first, last))
