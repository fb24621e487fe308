"""Runs one warp through a kernel, and records what it issues. Only integers decide the warp's way.

Lanes diverge and converge as in the hardware. The lanes that are furthest behind go first, and BSYNC waits for the
lanes of its BSSY. A branch on floating-point data goes where a usual number goes; Warp.guess has the rule.
"""

from dataclasses import dataclass

from . import arithmetic as at
from .listing import BYTES
from .operands import Lane
from .results import Results
from .width import FLOW

WARP_LANES = 32
BLOCK_THREADS = 256
MOST_STEPS = 200_000


class TraceError(Exception):
    """The kernel cannot be followed: it names the kernel, the address and the reason."""


@dataclass(frozen=True)
class Event:
    """One issue of an instruction. A lane executes it if its guard is true or unknown."""

    instruction: object
    lanes: int  # how many of the warp are there
    executing: int
    region: str = ""  # of device memory that it reads or writes, or "shared"
    shared: tuple = ()  # addresses of words in shared memory


@dataclass
class Group:
    """Lanes that are at the same instruction."""

    pc: int
    lanes: list


def constants_of(arguments, banks):
    """The constant bytes by bank and offset: arguments, the shape of block and grid, and the compiler's literals.

    The shape lies 0x20 bytes before arguments at 0x380, and first otherwise."""
    shape = 0x360 if banks.param_base == 0x380 else 0
    values = b"".join(value.to_bytes(4, "little") for value in (BLOCK_THREADS, 1, 1, 1, 1, 1))
    parts = (0, shape, values), (0, banks.param_base, arguments), (2, 0, banks.literals)
    return {(bank, start + k): byte for bank, start, text in parts for k, byte in enumerate(text)}


class Warp(Results):
    def __init__(self, name, instructions, launch, banks):
        super().__init__(constants_of(launch.arguments, banks), launch.memory)
        self.name, self.is_rare = name, launch.path.is_rare
        self.first_close = launch.first_close
        self.code = {instruction.address: instruction for instruction in instructions}
        first = WARP_LANES * launch.path.warp
        self.groups = [Group(0, [Lane(first + number, number) for number in range(WARP_LANES)])]
        self.alive = WARP_LANES
        self.barriers, self.waiting, self.events = {}, {}, []

    def fail(self, instruction, why):
        raise TraceError(f"{self.name} at 0x{instruction.address:x} ({instruction.text}): {why}")

    def run(self):
        while self.groups:
            group = self.behind()
            if group.pc not in self.code:
                raise TraceError(f"{self.name}: no instruction at 0x{group.pc:x}")
            instruction = self.code[group.pc]
            if len(self.events) >= MOST_STEPS:
                self.fail(instruction, f"{MOST_STEPS} instructions and no end; the loop's end is not understood")
            try:
                self.step(instruction, group)
            except (LookupError, ValueError, TypeError) as error:
                self.fail(instruction, f"{type(error).__name__}: {error}")
        if self.alive:
            raise TraceError(f"{self.name}: lanes wait for each other at the end")
        return self.events

    def behind(self):
        """The group that is furthest behind, together with lanes that have come to the same instruction."""
        if len(self.groups) == 1:
            return self.groups[0]
        pc = min(group.pc for group in self.groups)
        first, *others = (group for group in self.groups if group.pc == pc)
        for other in others:
            first.lanes = sorted(first.lanes + other.lanes, key=lambda lane: lane.number)
            self.groups.remove(other)
        return first

    def step(self, instruction, group):
        guards, executing = self.guards(instruction, group.lanes)
        lanes, (region, shared) = len(group.lanes), ("", ())
        group.pc += BYTES
        if instruction.opcode in FLOW:
            getattr(self, f"flow_{instruction.opcode}")(instruction, group, guards)
        elif executing:
            if isinstance(guards, list):
                guards = [guard for guard in guards if guard is not False]
                guards = True if all(guard is True for guard in guards) else guards
            region, shared = self.execute(instruction, executing, guards)
        self.events.append(Event(instruction, lanes, len(executing), region, shared))

    def guards(self, instruction, lanes):
        """The guard is one value for all lanes or a list; the result also has the lanes that execute."""
        operand = instruction.guard
        if operand is None:
            return True, lanes
        if (operand.kind, operand.number) not in self.varying:
            guard = self.predicate(lanes[0], operand)
            return guard, [] if guard is False else lanes
        guards = [self.predicate(lane, operand) for lane in lanes]
        if guards.count(guards[0]) == len(guards):
            return guards[0], [] if guards[0] is False else lanes
        return guards, [lane for lane, guard in zip(lanes, guards) if guard is not False]

    # Control flow.

    def taken(self, instruction, group, guards, guess):
        """Lanes whose guards and further predicates are true. `guess` decides if these depend on floating-point data.
        """
        more = [operand for operand in instruction.operands[:-1] if operand.kind in ("P", "UP")]
        if not more and guards is True:
            return group.lanes
        guards = guards if isinstance(guards, list) else [guards] * len(group.lanes)
        for operand in more:
            guards = [at.combine("AND", guard, self.predicate(lane, operand)) for lane, guard in zip(group.lanes, guards)]
        for guard in set(guards):
            if isinstance(guard, str):
                if guard != at.FLOAT:
                    self.fail(instruction, f"the branch depends on {guard}")
                choice = guess(instruction)
                guards = [choice if isinstance(guard, str) else guard for guard in guards]
        return [lane for lane, guard in zip(group.lanes, guards) if guard]

    def leave(self, group, lanes):
        """Takes lanes out of their group."""
        gone = {lane.number for lane in lanes}
        group.lanes = [lane for lane in group.lanes if lane.number not in gone]
        if not group.lanes:
            self.groups.remove(group)

    def jump(self, instruction, group, lanes):
        if len(lanes) == len(group.lanes):
            group.pc = instruction.target()
        elif lanes:
            self.leave(group, lanes)
            self.groups.append(Group(instruction.target(), lanes))

    def flow_BRA(self, instruction, group, guards):
        if instruction.parts and instruction.parts[0] in ("DIV", "CONV"):
            together = len(group.lanes) == self.alive
            if together == (instruction.parts[0] == "CONV"):
                group.pc = instruction.target()
            return
        self.jump(instruction, group, self.taken(instruction, group, guards, self.guess))

    def flow_CALL(self, instruction, group, guards):
        self.jump(instruction, group, self.taken(instruction, group, guards, self.guess))

    def guess(self, instruction):
        """Whether a branch on floating-point data is taken.

        The compiler puts the rare cases of IEEE division and root, such as subnormal numbers, into subroutines. If one
        side of the branch calls before its next decision, the other side is the usual one. Paths of the rare cases are
        the exception. Without a call the branch skips work forward, and that work is counted. A loop that ends on data
        is refused."""
        if (usual := self.unless_close(instruction)) is not None:
            return usual
        falls, jumps = (self.calls(start) for start in (instruction.address + BYTES, instruction.target()))
        if falls != jumps:
            return falls != self.is_rare
        if instruction.target() <= instruction.address:
            self.fail(instruction, "a loop ends on floating-point data")
        return False

    def unless_close(self, instruction):
        """Whether a branch is taken that tests if a code is too close to a threshold (kernels/numeric/codes.h); None
        for any other branch.

        Fewer than one warp in a hundred has such a code (kernels/PERFORMANCE.md)."""
        guard, pc = instruction.guard, instruction.address - BYTES
        while guard is not None and pc in self.code and self.code[pc].opcode not in ("BRA", "BSYNC"):
            asked = self.code[pc]
            if asked.opcode == "ISETP" and (asked.operands[0].kind, asked.operands[0].number) == (guard.kind, guard.number):
                limit = asked.operands[3].number & at.MASK if asked.operands[3].kind == "number" else 0
                if "U32" not in asked.parts or limit + 1 < self.first_close or limit > self.first_close:
                    return None
                return (asked.parts[0] in ("LT", "LE")) != guard.inverse
            pc -= BYTES
        return None

    def calls(self, pc):
        """Whether straight-line code from here on reaches a call before the next decision."""
        seen = set()
        while pc in self.code and pc not in seen:
            seen.add(pc)
            instruction = self.code[pc]
            if instruction.opcode == "CALL":
                return instruction.guard is None
            if instruction.opcode in ("EXIT", "RET", "BRX", "BRXU", "BSYNC"):
                return False
            if instruction.opcode == "BRA":
                if instruction.guard is not None or len(instruction.operands) > 1:
                    return False
                pc = instruction.target()
            else:
                pc += BYTES
        return False

    def flow_RET(self, instruction, group, guards):
        self.scatter(instruction, group, guards, 0)

    def flow_BRX(self, instruction, group, guards):
        """A jump by a table. The target is the next instruction, plus a register and a number."""
        self.scatter(instruction, group, guards, instruction.address + BYTES + instruction.operands[1].number)

    flow_BRXU = flow_BRX

    def scatter(self, instruction, group, guards, base):
        """Lanes continue where a register says, counted from the base."""
        places = {lane.number: self.value(lane, instruction.operands[0], 2) for lane in group.lanes}
        if guards is not True or any(isinstance(place, str) for place in places.values()):
            self.fail(instruction, "where it goes is unknown, or only some lanes go")
        self.groups.remove(group)
        for place in sorted(set(places.values())):
            lanes = [lane for lane in group.lanes if places[lane.number] == place]
            self.groups.append(Group(base + place & at.WIDE, lanes))

    def flow_BSSY(self, instruction, group, guards):
        self.barriers[instruction.operands[0].text] = {lane.number for lane in group.lanes}

    def flow_BREAK(self, instruction, group, guards):
        gone = {lane.number for lane in self.taken(instruction, group, guards, lambda _: self.fail(
            instruction, "lanes leave a barrier by floating-point data"))}
        self.barriers[instruction.operands[-1].text] -= gone
        self.release()

    def flow_BSYNC(self, instruction, group, guards):
        name = instruction.operands[-1].text
        if self.barriers[name] <= {lane.number for lane in group.lanes}:
            return  # nobody is missing
        self.groups.remove(group)
        self.waiting.setdefault(name, []).append(group)
        self.release()

    def flow_EXIT(self, instruction, group, guards):
        """If data decides, a lane goes where `guess` says."""
        lanes = self.taken(instruction, group, guards, lambda _: False)
        self.alive -= len(lanes)
        for members in self.barriers.values():
            members -= {lane.number for lane in lanes}
        self.leave(group, lanes)
        self.release()

    def release(self):
        """Releases lanes at a barrier to which all remaining lanes have come."""
        for name, groups in list(self.waiting.items()):
            lanes = [lane for group in groups for lane in group.lanes]
            if self.barriers[name] <= {lane.number for lane in lanes}:
                del self.waiting[name]
                self.groups.append(Group(groups[0].pc, sorted(lanes, key=lambda lane: lane.number)))

    def flow_nothing(self, instruction, group, guards):
        """Ignores waits, because a trace of one warp does not need them."""

    flow_BAR = flow_WARPSYNC = flow_NOP = flow_MEMBAR = flow_ERRBAR = flow_CGAERRBAR = flow_CCTL = flow_nothing
    flow_DEPBAR = flow_LDGDEPBAR = flow_YIELD = flow_NANOSLEEP = flow_nothing
