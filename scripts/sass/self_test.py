"""Tests of the reader on code whose answers are known: single instructions, and a small kernel with and without a fault.

The compiler lane runs the tests before it reads kernels; `scripts/sass_latency.py --self-test` runs them too. The first
test that fails ends it with an AssertionError.
"""

from dataclasses import replace

from . import arithmetic as at
from .dependence import UnguardedLoad, waited_loads
from .elf import Banks
from .launch import NORM, Launch
from .listing import Control, instructions_of
from .operands import Lane
from .record import EVERY, judge_together
from .results import plan
from .rounds import Figures, read_trace
from .warp import BLOCK_THREADS, TraceError, WARP_LANES, Warp

BANKS = Banks(0x210, (0x120).to_bytes(4, "little"))
# A kernel that walks over tiles and loads two fours of each; %s is where a wait for the first may stand.
TILE_LOOP = """
    S2R R0, SR_TID.X ;            stall 1 sets 0
    IMAD.MOV.U32 R1, RZ, RZ, RZ ; stall 5
    LDC.64 R2, c[0x0][0x238] ;    stall 1 sets 1
    IMAD.WIDE.U32 R2, R0, 0x4, R2 ; stall 5 waits 01
    LDC.64 R4, c[0x0][0x220] ;    stall 2 sets 0
    LDG.E R5, [R4.64+0x20] ;      stall 2 sets 1 waits 0
    ISETP.EQ.AND P1, PT, R5, RZ, PT ; stall 12 waits 1
    @P1 EXIT ;                    stall 5
    LDG.E R6, [R2.64] ;           stall 1 sets 2
    %s
    LDG.E R7, [R2.64+0x400] ;     stall 1 sets 3
    FADD R6, R6, R7 ;             stall 4 waits 23
    FSETP.GT.AND P0, PT, R6, RZ, PT ; stall 12
    @P0 BRA 0xf0 ;                stall 5
    FADD R6, R6, R6 ;             stall 2
    LDC R8, c[0x2][RZ] ;          stall 2 sets 4
    BRX R8 -0x110 ;               stall 5 waits 4
    IADD3 R2, P2, R2, 0x4000, RZ ; stall 4
    IADD3 R2, P2, R2, 0x2000, RZ ; stall 4
    IMAD.X R3, RZ, RZ, R3, P2 ;   stall 4
    IADD3 R1, R1, 0x1, RZ ;       stall 4
    ISETP.GE.U32.AND P0, PT, R1, 0x4, PT ; stall 12
    @!P0 BRA 0x40 ;               stall 5
    EXIT ;                        stall 5
"""
WAIT, NO_WAIT = "IMAD.U32 R6, R6, 0x10000, RZ ; stall 4 waits 2", "IMAD.U32 R8, R8, 0x10000, RZ ; stall 4"


def assembled(text):
    """Instructions from lines of text, which are first rewritten in the format that cuobjdump prints."""
    lines = []
    for number, line in enumerate(line for line in text.splitlines() if line.strip()):
        code, _, fields = line.partition(";")
        words = fields.split()
        given = dict(zip(words[::2], words[1::2]))
        waits = sum(1 << int(k) for k in given.get("waits", ""))
        upper = int(given["stall"]) << 41 | int(given.get("sets", 7)) << 46 | 7 << 49 | waits << 52
        lines += [f"        /*{16 * number:04x}*/ {code.strip()} ;  /* 0x{0:016x} */", f"    /* 0x{upper:016x} */"]
    return instructions_of("\n".join(lines))


def result(text, registers=(), predicates=()):
    """The value that an instruction leaves in its first result, or in all its results if there are several."""
    (instruction,) = assembled(text + " ; stall 1")
    warp, lane = Warp("test", [instruction], LaunchOfNothing, BANKS), Lane(5, 5)
    for number, value in dict(registers).items():
        lane.registers[number] = value
    for number, value in dict(predicates).items():
        lane.predicates[number] = value
    compute, outputs, operands, *_ = plan(instruction)
    values = compute(*(warp.value(lane, operand, words) for operand, words in operands))
    return values[0] if len(outputs) == 1 else values


class LaunchOfNothing:
    arguments, memory, path, first_close = b"", None, NORM[0], (1 << 32) - 14


def test_a_branch_for_codes_that_are_close_is_not_the_usual_way():
    for asked, usual in (("ISETP.GE.U32.AND P1, PT, R24, -0xe, PT ; stall 13\n@!P1 BRA 0x30 ; stall 5", True),
                         ("ISETP.GT.U32.AND P1, PT, R24, -0xf, PT ; stall 13\n@P1 BRA 0x30 ; stall 5", False),
                         ("ISETP.LT.U32.AND P1, PT, R24, -0xe, PT ; stall 13\n@P1 BRA 0x30 ; stall 5", True),
                         ("ISETP.GE.U32.AND P1, PT, R24, -0x2e, PT ; stall 13\n@!P1 BRA 0x30 ; stall 5", None)):
        code = assembled(asked + "\nEXIT ; stall 5\nEXIT ; stall 5")
        assert Warp("test", code, LaunchOfNothing, BANKS).unless_close(code[1]) == usual, asked


def test_control_fields():
    fields = Control.of(0x000E240000000A00)  # of LDC.64 R2, c[0x0][0x228]
    assert (fields.stall, fields.write_barrier, fields.read_barrier, fields.waits) == (2, 0, 7, 0), fields
    fields = Control.of(0x001FC8000BF03070)  # of the ISETP that uses its result
    assert (fields.stall, fields.write_barrier, fields.waits) == (4, 7, 1), fields


def test_integers():
    most = at.MASK
    assert result("IADD3 R0, P0, R1, R2, RZ", {1: most, 2: 3}) == [2, True]
    assert result("IADD3 R0, P0, R1, -R2, RZ", {1: 7, 2: 7}) == [0, True]  # no borrow
    assert result("IADD3.X R0, R1, 0x2, RZ, P0, !PT", {1: 5}, {0: True}) == 8
    assert result("IMAD.WIDE.U32 R0, R1, 0x10, R2", {1: most, 2: 1, 3: 0}) == (most << 4) + 1
    assert result("IMAD R0, R1, -0x2, R2", {1: 3, 2: 10}) == 4
    assert result("LEA R0, P0, R1, R2, 0x2", {1: 0x40000001, 2: 8}) == [12, False]
    assert result("LEA.HI.X R0, R1, R2, R3, 0x2, P0", {1: 0xC0000000, 2: 1, 3: 1}, {0: True}) == 9
    assert result("SHF.R.U64 R0, R1, 0x4, R2", {1: 0x10, 2: 0x5}) == 0x50000001
    assert result("SHF.L.U64.HI R0, R1, 0x4, R2", {1: 0xF0000000, 2: 1}) == 0x1F
    assert result("SHF.R.S32.HI R0, RZ, 0x1f, R1", {1: 0x80000000}) == most
    assert result("LOP3.LUT R0, R1, 0xf, RZ, 0xc0, !PT", {1: 0x3C}) == 0xC
    assert result("LOP3.LUT P0, RZ, R1, 0x3, RZ, 0xc0, !PT", {1: 4})[0] is False
    assert result("PRMT R0, R1, 0x5410, R2", {1: 0xAAAA1111, 2: 0xBBBB2222}) == 0x22221111
    assert result("ISETP.GE.U32.AND P0, PT, R1, R2, PT", {1: most, 2: 1})[0] is True
    assert result("ISETP.GE.AND P0, PT, R1, R2, PT", {1: most, 2: 1})[0] is False
    assert result("ISETP.GE.U32.AND.EX P0, PT, R1, R2, PT, P1", {1: 4, 2: 4}, {1: False})[0] is False
    assert result("VIMNMX R0, R1, R2, !PT", {1: most, 2: 1}) == 1
    assert result("PLOP3.LUT P0, PT, P1, P2, PT, 0xa8, 0x0", (), {1: False, 2: True})[0] is True
    assert result("FSETP.NEU.AND P0, PT, R1, RZ, PT", {1: 0x3F800000})[0] is True


def test_unknown_values():
    """Known bits stay known beside unknown bits, and a known input may determine a result."""
    unknown = at.FLOAT
    flags = result("LOP3.LUT R0, R1, 0x8, RZ, 0xfc, !PT", {1: unknown})
    assert isinstance(flags, str) and result("LOP3.LUT P0, RZ, R1, 0x8, RZ, 0xc0, !PT", {1: flags})[0] is True
    assert result("LOP3.LUT P0, RZ, R1, 0x4, RZ, 0xc0, !PT", {1: flags})[0] == unknown
    assert result("LOP3.LUT R0, R1, RZ, RZ, 0xc0, !PT", {1: unknown}) == 0
    assert result("ISETP.EQ.OR P0, PT, R1, RZ, P1", {1: unknown}, {1: True})[0] is True
    assert result("IADD3 R0, R1, R2, RZ", {1: flags, 2: "the result of TEST"}) == "the result of TEST"


def traced(abi, code):
    launch = Launch(abi, NORM[0], None)
    warp = Warp("test", code, launch, BANKS)
    return read_trace(warp.run(), warp.code, abi["TILE_ELEMENTS"], BLOCK_THREADS // WARP_LANES)


def test_rounds(abi):
    """Both loads are in flight together, unless something waits between them."""
    figures = traced(abi, assembled(TILE_LOOP % NO_WAIT)).figures
    assert (figures.loads, figures.together, figures.latencies) == (2, 2, 1), figures
    assert (figures.instructions, figures.stalls, figures.rereads) == (18, 86, 1), figures
    assert (figures.first_chain, figures.tile_chain) == (1, 1), figures
    figures = traced(abi, assembled(TILE_LOOP % WAIT)).figures
    assert (figures.loads, figures.together, figures.latencies) == (2, 1, 2), figures


def refused(error, function, *arguments):
    try:
        function(*arguments)
    except error:
        return True
    return False


def test_faults_are_found(abi):
    """A field decoded at a wrong position, a loop that ends on data, and an address outside the streams are errors."""
    code = assembled(TILE_LOOP % NO_WAIT)
    events = traced(abi, code).events
    for change in ({"write_barrier": 7}, {"write_barrier": 5}, {"waits": 0}):
        wrong = {instruction: replace(instruction, control=replace(instruction.control, **change)) for instruction in code}
        assert refused(UnguardedLoad, waited_loads, [replace(event, instruction=wrong[event.instruction]) for event in events])
    by_data = (TILE_LOOP % NO_WAIT).replace("ISETP.GE.U32.AND P0, PT, R1, 0x4, PT", "FSETP.GE.AND P0, PT, R6, RZ, PT")
    assert refused(TraceError, traced, abi, assembled(by_data))
    outside = (TILE_LOOP % NO_WAIT).replace("0x2000", "0x20000")
    assert refused(TraceError, traced, abi, assembled(outside))
    by_unknown = (TILE_LOOP % NO_WAIT).replace("ISETP.EQ.AND P1, PT, R5, RZ", "BMSK P1, R5, RZ")
    assert refused(TraceError, traced, abi, assembled(by_unknown))


def test_the_rule_of_loads_in_flight():
    """A wait between loads is a fault if it is not listed. A row of the list that is no longer true is a fault too."""
    def faults(name, path, together):
        found, said = {(name, path, "90"): Figures(128, 1, 1, 4, together, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0)}, []
        judge_together(found, lambda fine, fault: fine or said.append(fault), False, {"bf16": EVERY})
        whole = []
        judge_together(found, lambda fine, fault: fine or whole.append(fault), True, {"bf16": EVERY})
        return len(said), len(whole)

    assert faults("instep_step_test", "f32", 4) == (0, 0)
    assert faults("instep_step_test", "f32", 3) == (1, 1)
    assert faults("instep_step_test", "bf16", 3) == (0, 0)
    assert faults("instep_step_test", "bf16", 4) == (0, 1)  # other architectures may still wait


def run(abi):
    test_the_rule_of_loads_in_flight()
    test_control_fields()
    test_integers()
    test_unknown_values()
    test_rounds(abi)
    test_faults_are_found(abi)
