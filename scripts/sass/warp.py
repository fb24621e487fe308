"""Runs one warp through a kernel, as far as integers decide where it goes, and records what it issues.

The warp is three lanes, its first, its second and its last, since only these are told apart by a kernel over full tiles.
Lanes go apart and together again as the hardware lets them: the lanes that are furthest behind go first, and BSYNC waits
for those that its BSSY took. A branch on floating-point data goes where a usual number goes; Warp.guess has the rule.
"""

from dataclasses import dataclass

from . import arithmetic as at
from .listing import BYTES
from .operands import Lane
from .results import Results

LANES = (0, 1, 31)
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
    region: str = ""  # of the memory that it reads or writes


def constant_bank(arguments, param_base):
    """Bytes by offset: the arguments, and the shape of block and grid, 0x20 before arguments at 0x380 and first otherwise."""
    shape = 0x360 if param_base == 0x380 else 0
    values = b"".join(value.to_bytes(4, "little") for value in (BLOCK_THREADS, 1, 1, 1, 1, 1))
    return {start + k: byte for start, text in ((shape, values), (param_base, arguments)) for k, byte in enumerate(text)}


class Warp(Results):
    def __init__(self, name, instructions, launch, param_base):
        super().__init__(constant_bank(launch.arguments, param_base), launch.memory)
        self.name = name
        self.code = {instruction.address: instruction for instruction in instructions}
        self.lanes = [Lane(32 * launch.path.warp + lane, lane) for lane in LANES]
        self.barriers, self.events = {}, []

    def fail(self, instruction, why):
        raise TraceError(f"{self.name} at 0x{instruction.address:x} ({instruction.text}): {why}")

    def run(self):
        while running := [lane for lane in self.lanes if lane.pc is not None and lane.waits_for is None]:
            pc = min(lane.pc for lane in running)
            active = [lane for lane in running if lane.pc == pc]
            if pc not in self.code:
                raise TraceError(f"{self.name}: no instruction at 0x{pc:x}")
            instruction = self.code[pc]
            if len(self.events) >= MOST_STEPS:
                self.fail(instruction, f"{MOST_STEPS} instructions and no end; the loop's end is not understood")
            try:
                self.step(instruction, active)
            except (LookupError, ValueError, TypeError, IndexError) as error:
                self.fail(instruction, f"{type(error).__name__}: {error}")
        if any(lane.pc is not None for lane in self.lanes):
            raise TraceError(f"{self.name}: lanes wait for each other at the end")
        return self.events

    def step(self, instruction, active):
        guards = [True if instruction.guard is None else self.predicate(lane, instruction.guard) for lane in active]
        executing = [lane for lane, guard in zip(active, guards) if guard is not False]
        region = ""
        flow = getattr(self, f"flow_{instruction.opcode}", None)
        for lane in active:
            lane.pc += BYTES
        if flow:
            flow(instruction, active, list(zip(active, guards)))
        elif executing:
            region = self.execute(instruction, executing, [guard for guard in guards if guard is not False])
        self.events.append(Event(instruction, len(active), len(executing), region))

    # Control flow. `guarded` pairs each active lane with its guard.

    def flow_BRA(self, instruction, active, guarded):
        if instruction.parts and instruction.parts[0] in ("DIV", "CONV"):
            together = len(active) == sum(lane.pc is not None for lane in self.lanes)
            if together == (instruction.parts[0] == "CONV"):
                self.jump(instruction, active)
            return
        more = [operand for operand in instruction.operands[:-1] if operand.kind in ("P", "UP")]
        for lane, guard in guarded:
            for operand in more:
                guard = at.combine("AND", guard, self.predicate(lane, operand))
            if isinstance(guard, str):
                if guard != at.FLOAT:
                    self.fail(instruction, f"the branch depends on {guard}")
                guard = self.guess(instruction)
            if guard:
                self.jump(instruction, [lane])

    def jump(self, instruction, lanes):
        for lane in lanes:
            lane.pc = instruction.target()

    def guess(self, instruction):
        """Whether a branch on floating-point data is taken.

        The compiler puts the rare ends of IEEE division and root, subnormal numbers and the like, into subroutines: if one
        side calls before its next decision, the other is the usual one. Without a call the branch skips work forward, and
        the work is counted. A loop that ends on data is refused."""
        calls = [self.calls(start) for start in (instruction.address + BYTES, instruction.target())]
        if calls[0] != calls[1]:
            return calls[0]
        if instruction.target() <= instruction.address:
            self.fail(instruction, "a loop ends on floating-point data")
        return False

    def calls(self, pc):
        """Whether straight-line code from here on reaches a call before the next decision."""
        seen = set()
        while pc in self.code and pc not in seen:
            seen.add(pc)
            instruction = self.code[pc]
            if instruction.opcode == "CALL":
                return True
            if instruction.opcode in ("EXIT", "RET", "BRX", "BSYNC"):
                return False
            if instruction.opcode == "BRA":
                if instruction.guard is not None or len(instruction.operands) > 1:
                    return False
                pc = instruction.target()
            else:
                pc += BYTES
        return False

    def flow_BSSY(self, instruction, active, guarded):
        self.barriers[instruction.operands[0].text] = {id(lane) for lane in active}

    def flow_BREAK(self, instruction, active, guarded):
        for lane, guard in guarded:
            if isinstance(guard, str):
                self.fail(instruction, f"the predicate is unknown: {guard}")
            if guard:
                self.barriers[instruction.operands[0].text].discard(id(lane))
        self.release()

    def flow_BSYNC(self, instruction, active, guarded):
        for lane in active:
            lane.waits_for = instruction.operands[0].text
        self.release()

    def release(self):
        """Lets lanes go on for which all of their barrier have come or ended."""
        for name, members in self.barriers.items():
            alive = {id(lane) for lane in self.lanes if lane.pc is not None} & members
            waiting = [lane for lane in self.lanes if lane.waits_for == name]
            if waiting and alive <= {id(lane) for lane in waiting}:
                for lane in waiting:
                    lane.waits_for = None

    def flow_EXIT(self, instruction, active, guarded):
        for lane, guard in guarded:
            if isinstance(guard, str) and guard != at.FLOAT:
                self.fail(instruction, f"the predicate is unknown: {guard}")
            if guard is True:  # by data a lane goes on, as by guess
                lane.pc = None
        self.release()

    def flow_CALL(self, instruction, active, guarded):
        self.jump(instruction, [lane for lane, guard in guarded if guard is not False])

    def flow_RET(self, instruction, active, guarded):
        for lane, guard in guarded:
            back = self.word(lane, instruction.operands[0])
            if isinstance(back, str):
                self.fail(instruction, f"the return address is unknown: {back}")
            if guard is not False:
                lane.pc = back

    def flow_BRX(self, instruction, active, guarded):
        self.fail(instruction, "a jump by a table is not followed")

    def flow_nothing(self, instruction, active, guarded):
        """Waits for lanes or threads that a trace of one warp has already."""

    flow_BAR = flow_WARPSYNC = flow_NOP = flow_MEMBAR = flow_ERRBAR = flow_CGAERRBAR = flow_CCTL = flow_nothing
    flow_DEPBAR = flow_YIELD = flow_WARPSYNC

