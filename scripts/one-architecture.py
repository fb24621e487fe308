#!/usr/bin/env python3
"""Keeps the machine code of one architecture in every fat binary of a file, and overwrites the rest with zeros.

    scripts/one-architecture.py libnccl.so.2 90 libnccl-sm_90.so.2

Two thirds of NCCL's library are code for other GPUs. That is too much to carry to a machine with one kind of GPU. Zeros
compress well. Headers stay, so a driver still finds every entry and chooses the one that fits. The container is not
documented; src/cuda/built.rs describes it. The result is a new file; a file without code for the architecture is
refused.
"""

import struct, sys
from pathlib import Path

MAGIC = bytes.fromhex("50ed55ba")
MACHINE_CODE = 2


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__.split("\n\n")[1].strip())
    source, architecture, target = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    data = bytearray(source.read_bytes())
    kept = erased = 0
    start = data.find(MAGIC)
    while start >= 0:
        _, version, header_bytes, size = struct.unpack_from("<IHHQ", data, start)
        end = start + header_bytes + size
        if version != 1 or end > len(data):
            start = data.find(MAGIC, start + 1)  # four bytes like any other
            continue
        at = start + header_bytes
        while at < end:
            kind, _, entry_header_bytes, bytes_ = struct.unpack_from("<HHIQ", data, at)
            (code,) = struct.unpack_from("<I", data, at + 28)
            first = at + entry_header_bytes
            if (kind, code) == (MACHINE_CODE, architecture):
                kept += bytes_
            else:
                data[first : first + bytes_] = bytes(bytes_)
                erased += bytes_
            at = first + bytes_
        start = data.find(MAGIC, end)
    if kept == 0:
        sys.exit(f"{source.name} holds no machine code for sm_{architecture}")
    target.write_bytes(data)
    print(f"{source.name}: {kept / 1e6:.0f} MB for sm_{architecture} kept, {erased / 1e6:.0f} MB for others erased")


main()
