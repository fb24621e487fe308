"""Which load waits for which: scoreboard barriers along a trace, and chains of loads whose address needs another load.

A warp issues in order. So a wait for one load delays every later load, even one that does not need the result.
"""

from .listing import BARRIERS, NO_BARRIER
from .width import read, written

GLOBAL = ("LDG", "LD")


class UnguardedLoad(Exception):
    """A result was read before its barrier: the scheduling fields are decoded wrongly."""


def is_load(event):
    return event.instruction.opcode in GLOBAL and event.executing > 0


def waits_of(instruction):
    """Barriers for which it waits, all or, for DEPBAR, one."""
    if instruction.opcode == "DEPBAR":
        return [int(instruction.operands[0].text[2:])]
    return [k for k in range(BARRIERS) if instruction.control.waits >> k & 1]


def waited_loads(events):
    """For each event, the loads (their positions) for which it waits: those that set its barriers since the last wait.

    Each load must set a barrier, and its result must not be read or overwritten before a wait for it."""
    outstanding = [[] for _ in range(BARRIERS)]
    pending = {}  # register: position of the load that fills it
    found = []
    for position, event in enumerate(events):
        instruction, waited = event.instruction, []
        for k in waits_of(instruction):
            waited += outstanding[k]
            outstanding[k] = []
        done = set(waited)
        pending = {name: load for name, load in pending.items() if load not in done} if done else pending
        for name in (*read(instruction), *written(instruction)):
            if event.executing and name in pending:
                raise UnguardedLoad(f"{instruction.text} at 0x{instruction.address:x} uses {name[0]}{name[1]}, which the load at "
                                    f"0x{events[pending[name]].instruction.address:x} fills, before a wait for it")
        if is_load(event):
            barrier = instruction.control.write_barrier
            if barrier == NO_BARRIER:
                raise UnguardedLoad(f"{instruction.text} at 0x{instruction.address:x} sets no barrier")
            outstanding[barrier].append(position)
            pending |= {name: position for name in written(instruction)}
        found.append(waited)
    return found


def parents_of_loads(events):
    """For each load, the loads without whose results it could not be issued: by its address, its predicate, or a branch
    before it. Loads that those need in turn are not repeated."""
    needs, control, parents = {}, frozenset(), {}
    for position, event in enumerate(events):
        instruction = event.instruction
        inputs = frozenset().union(*(needs.get(name, frozenset()) for name in read(instruction)))
        if instruction.opcode in ("BRA", "EXIT", "RET", "BRX"):
            control |= inputs
        if not event.executing:
            continue
        if is_load(event):
            parents[position] = inputs | control
            inputs = frozenset((position,))
        for name in written(instruction):
            # A lane that did not execute keeps its old value.
            needs[name] = inputs if event.executing == event.lanes else inputs | needs.get(name, frozenset())
    return parents


def chain(parents, last, first=0):
    """Loads on the longest chain that ends in what `last` needs, among those from position `first` on."""
    depth = {}
    for position in sorted(parents):
        if first <= position <= last:
            depth[position] = 1 + max((depth.get(parent, 0) for parent in parents[position]), default=0)
    return depth[last] - 1
