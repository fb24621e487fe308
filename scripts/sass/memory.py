"""Device memory of a traced launch: structs with bytes, and streams of elements without bytes.

An address outside all regions stops the trace. This finds a wrong argument, or an instruction that is computed wrongly.
"""

import struct

from .arithmetic import FLOAT

WIDTHS = {"u32": "<I", "u64": "<Q", "f32": "<f", "f64": "<d"}


class Memory:
    """Regions of device memory. A region without bytes is a stream, whose values are unknown."""

    def __init__(self):
        self.regions = []
        self.latest = (0, 0, "", None)  # the lanes of a warp ask for one region after each other
        self.poison = {}  # addresses that were written with a value that is not known

    def add(self, name, address, size, is_stream=False):
        self.regions.append((address, address + size, name, None if is_stream else bytearray(size)))
        return address

    def region(self, address, size):
        first, last, name, content = self.latest
        if first <= address and address + size <= last:
            return first, name, content
        for first, last, name, content in self.regions:
            if first <= address and address + size <= last:
                self.latest = first, last, name, content
                return first, name, content
        raise LookupError(f"{size} bytes at 0x{address:x} are outside every stream and struct of the launch")

    def put(self, address, kind, value):
        data = struct.pack(WIDTHS[kind], value)
        first, _, content = self.region(address, len(data))
        content[address - first : address - first + len(data)] = data

    def read(self, address, size):
        first, _, content = self.region(address, size)
        if content is None:
            return FLOAT
        for at in range(address, address + size):
            if at in self.poison:
                return self.poison[at]
        return int.from_bytes(content[address - first : address - first + size], "little")

    def write(self, address, size, value):
        first, _, content = self.region(address, size)
        if content is None:
            return
        for at in range(address, address + size):
            self.poison.pop(at, None)
            if isinstance(value, str):
                self.poison[at] = value
        if not isinstance(value, str):
            content[address - first : address - first + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
