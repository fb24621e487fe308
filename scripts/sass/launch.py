"""A launch for a traced warp: its arguments, and device memory that holds real control structs.

Streams have addresses but no values, because the values of elements do not change the speed of a warp.
"""

import struct
from dataclasses import dataclass

from .memory import WIDTHS, Memory

RUNS = 3  # the second is judged: it does not open its segment, and after it a run remains to be fetched
RUN_TILES = 8  # so that every warp of a block has a round of the norm
TILES = RUNS * RUN_TILES


@dataclass(frozen=True)
class Path:
    """How a run stores its streams, and which of the kernel's launches it belongs to."""

    name: str
    param: str = "F32"
    grad: str = "F32"
    moments: str = "F32"
    master: str = "NONE"
    shift: int = 0  # elements from an aligned address to the gradients
    warp: int = 0
    part: str = "WHOLE"
    is_stochastic: bool = False
    is_rare: bool = False  # every division and root takes the compiler's subroutine for the ends of their ranges


FLOATS = [
    Path("f32"),
    Path("bf16", "BF16", "BF16", "BF16"),
    Path("bf16_stochastic", "BF16", "BF16", "BF16", is_stochastic=True),
    Path("bf16_master", "BF16", "BF16", "F32", "F32"),
    Path("remainder16", "BF16", "BF16", "F32", "REMAINDER16"),
    Path("remainder8", "BF16", "BF16", "F32", "REMAINDER8"),
    # The first and the last thread of a tile take other loads around the gradients, so a warp between them is traced.
    Path("f32_misaligned", shift=1, warp=2),
]
# A dividend of zero counts as an end: a row of the parameters without gradients, before its first.
ZEROS = [Path("f32_zeros", is_rare=True), Path("bf16_zeros", "BF16", "BF16", "BF16", is_rare=True)]
CODES = [Path("8bit", moments="8BIT")]
NORM = [Path("f32"), Path("bf16", grad="BF16"), Path("f16", grad="F16"), Path("f32_misaligned", shift=1, warp=2)]


class Launch:
    """Memory and arguments of one launch over RUNS runs of full tiles of one parameter, in one block."""

    def __init__(self, abi, path, optimizer):
        self.abi, self.path, self.memory = abi, path, Memory()
        self.first_close = abi.first_close()
        self.arguments = bytearray(abi.sizes["InstepStepLaunch" if optimizer else "InstepStepArgs"])
        tile, elements = abi["TILE_ELEMENTS"], TILES * abi["TILE_ELEMENTS"]
        bytes_of = {"F32": 4, "BF16": 2, "F16": 2, "8BIT": 1, "NONE": 0, "REMAINDER16": 2, "REMAINDER8": 1}
        states = 0 if optimizer is None else max(1, abi.optimizers[optimizer][1])
        base = iter(range(0x7F00_0000_0000, 0x7FFF_0000_0000, 1 << 32))
        structs = {name: self.memory.add(name, next(base), size) for name, size in (
            ("control", abi.sizes["InstepControl"]), ("records", abi.sizes["InstepRecord"]),
            ("tiles", TILES * abi.sizes["InstepTile"]), ("norms", abi.sizes["InstepNorms"]))}
        param = grads = 0
        grads = self.memory.add("gradients", next(base) + path.shift * bytes_of[path.grad], elements * bytes_of[path.grad], True)
        if optimizer is not None:
            param = self.memory.add("parameters", next(base), elements * bytes_of[path.param], True)
            if path.master != "NONE":
                self.argument("master", "u64", self.memory.add("master", next(base), elements * bytes_of[path.master], True))
            for k in range(states):
                size = elements * bytes_of[path.moments]
                self.argument("states", "u64", self.memory.add(f"state {k}", next(base), size, True), 8 * k)
                if path.moments == "8BIT":
                    size = 4 * (elements // abi["QUANTUM"])
                    self.argument("scales", "u64", self.memory.add(f"scale {k}", next(base), size, True), 8 * k)
            if path.part != "WHOLE":
                self.argument("norms", "u64", structs["norms"])
        for name in ("control", "records", "tiles"):
            self.argument(name, "u64", structs[name])
        self.argument("tile_count", "u64", TILES)
        self.argument("share", "u64", TILES)
        self.argument("grads", "u64", grads)
        for name, value in (("state_count", states), ("param_dtype", abi[f"DTYPE_{path.param}"]),
                            ("grad_dtype", abi[f"DTYPE_{path.grad}"]), ("copy_dtype", abi["DTYPE_F32"]),
                            ("master_kind", abi[f"MASTER_{path.master}"]), ("moments", abi[f"MOMENTS_{path.moments}"]),
                            ("part", abi[f"PART_{path.part}"]), ("stochastic", int(path.is_stochastic))):
            self.argument(name, "u32", value)
        self.fill(structs, param, optimizer, tile)

    def argument(self, name, kind, value, more=0):
        data = struct.pack(WIDTHS[kind], value)
        at = self.abi.offsets["InstepStepArgs", name] + more
        self.arguments[at : at + len(data)] = data

    def fill(self, structs, param, optimizer, tile):
        """A pass of data-parallel training: the mean over two ranks, no clipping, every segment used."""
        def put(struct_name, address, name, kind, value):
            self.memory.put(address + self.abi.offsets[struct_name, name], kind, value)

        for name, value in (("clip", 1.0), ("divisor", 2.0), ("loss_scale", 1.0)):
            put("InstepControl", structs["control"], name, "f64", value)
        for name, value in (("multiplier", 0.5), ("average_multiplier", 0.5), ("local_multiplier", 1.0)):
            put("InstepControl", structs["control"], name, "f32", value)
        put("InstepControl", structs["control"], "passes", "u64", 3)
        put("InstepRecord", structs["records"], "steps", "u64", 2)
        put("InstepRecord", structs["records"], "action", "u32", self.abi["ACTION_STEP"])
        at = structs["records"] + self.abi.offsets["InstepRecord", "scalars"]
        for kind, value in self.abi.scalars(optimizer) if optimizer else ():
            at += -at % struct.calcsize(WIDTHS[kind])
            self.memory.put(at, kind, value)
            at += struct.calcsize(WIDTHS[kind])
        param_bytes = 4 if self.path.param == "F32" else 2
        for t in range(TILES):
            address = structs["tiles"] + t * self.abi.sizes["InstepTile"]
            if optimizer is not None:
                put("InstepTile", address, "param", "u64", param + t * tile * param_bytes)
            for name in ("grad_offset", "state_offset", "element"):
                put("InstepTile", address, name, "u64", t * tile)
            put("InstepTile", address, "count", "u32", tile)
            put("InstepTile", address, "run", "u32", RUN_TILES - t % RUN_TILES)
            put("InstepTile", address, "first", "u32", int(t == 0))
        for which in range(2):
            for limb in range(8, 11):
                at = structs["norms"] + 8 * (which * self.abi["NORM_LIMBS"] + limb)
                self.memory.put(at, "u64", 0x1234_5678)
