"""Which load waits for which: scoreboard barriers along a trace, and chains of loads whose address needs another load.

A warp issues in order, so a wait for one load delays every later load, even one that does not need the result.
"""

from functools import cache

from .listing import BARRIERS, NO_BARRIER
from .width import read, written

GLOBAL = ("LDG", "LD", "LDGSTS")
NOTHING = frozenset()


class UnguardedLoad(Exception):
    """A result was read before its barrier: the scheduling fields are decoded wrongly."""


def is_load(event):
    return event.instruction.opcode in GLOBAL and event.executing > 0


@cache
def waits_of(instruction):
    """The barriers for which it waits, and how many setters of each may still be outstanding: none, except for
    DEPBAR.
    """
    waits = [(k, 0) for k in range(BARRIERS) if instruction.control.waits >> k & 1]
    if instruction.opcode == "DEPBAR":
        waits.append((int(instruction.operands[0].text[2:]), instruction.operands[1].number))
    return waits


def waited_loads(events):
    """For each event, the positions of the loads for which it waits. These loads have set the event's barriers since
    the last wait.

    Each load must set a barrier, and its result must not be read or overwritten before a wait for it."""
    outstanding = [[] for _ in range(BARRIERS)]  # a list of loads for each instruction that set the barrier
    copies = []  # to shared memory; the next LDGDEPBAR sets a barrier for all of them
    pending = {}  # register: position of the load that fills it
    found = []
    for position, event in enumerate(events):
        instruction, waited = event.instruction, []
        for barrier, rest in waits_of(instruction):
            keep = len(outstanding[barrier]) - rest
            waited += [load for loads in outstanding[barrier][: max(keep, 0)] for load in loads]
            outstanding[barrier] = outstanding[barrier][max(keep, 0) :]
        done = set(waited)
        pending = {name: load for name, load in pending.items() if load not in done} if done else pending
        for name in (*read(instruction), *written(instruction)):
            if event.executing and name in pending:
                raise UnguardedLoad(f"{instruction.text} at 0x{instruction.address:x} uses {name[0]}{name[1]}, which the load at "
                                    f"0x{events[pending[name]].instruction.address:x} fills, before a wait for it")
        barrier = instruction.control.write_barrier
        if instruction.opcode == "LDGSTS":
            copies += [position] if event.executing else []
        elif instruction.opcode == "LDGDEPBAR":
            outstanding[barrier].append(copies)
            copies = []
        elif is_load(event):
            if barrier == NO_BARRIER:
                raise UnguardedLoad(f"{instruction.text} at 0x{instruction.address:x} sets no barrier")
            outstanding[barrier].append([position])
            pending |= {name: position for name in written(instruction)}
        found.append(waited)
    return found


def parents_of_loads(events):
    """For each load, the earlier loads that it depends on through its address, its predicate, or a branch before it.
    Loads that those loads need in turn are not repeated."""
    needs, control, parents = {}, NOTHING, {}
    for position, event in enumerate(events):
        instruction = event.instruction
        places = [("shared", address) for address in event.shared]
        loads = instruction.opcode == "LDS"
        found = [needs[name] for name in (*read(instruction), *(places if loads else ())) if name in needs]
        inputs = NOTHING.union(*found) if len(found) > 1 else found[0] if found else NOTHING
        if instruction.opcode in ("BRA", "EXIT", "RET", "BRX", "BRXU"):
            control |= inputs
        if not event.executing:
            continue
        if is_load(event):
            parents[position] = inputs | control
            inputs = frozenset((position,))
        for name in (*written(instruction), *(() if loads else places)):
            # A lane that did not execute keeps its old value.
            needs[name] = inputs if event.executing == event.lanes else inputs | needs.get(name, NOTHING)
    return parents


def chain(parents, last, first=0):
    """Number of loads on the longest chain that ends in what `last` needs, among the loads from position `first` on."""
    depth = {}
    for position in sorted(parents):
        if first <= position <= last:
            depth[position] = 1 + max((depth.get(parent, 0) for parent in parents[position]), default=0)
    return depth[last] - 1
