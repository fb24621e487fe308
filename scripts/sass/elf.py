"""Constant banks of the kernels in a binary. The size of bank 0 tells where arguments start, and bank 2 has jump
tables.

A cubin is an ELF file of 64 bits with a section for each bank and kernel. A fat binary is unpacked by cuobjdump.
"""

import re, struct, subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Banks:
    param_base: int  # arguments end bank 0
    literals: bytes  # bank 2: numbers, and places in the kernel


def sections(data):
    """Name and content of each section; a section without content, such as shared memory, is left out."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not an ELF file of 64 bits; name a cubin")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * k) for k in range(count)]
    text = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        if kind != 8:
            yield data[text + name : data.index(b"\0", text + name)].decode(), data[offset : offset + length]


def banks_of(data, argument_bytes):
    """The constant banks of each kernel; `argument_bytes` gives the size of a kernel's arguments."""
    found = dict(sections(data))
    zero = ".nv.constant0."
    kernels = [name.removeprefix(zero) for name in found if name.startswith(zero)]
    return {name: Banks(len(found[zero + name]) - argument_bytes(name), found.get(f".nv.constant2.{name}", b"")) for name in kernels}


def banks_of_binary(tool, binary, folder, argument_bytes):
    """The constant banks of each kernel and architecture. `folder` is empty; the binary is unpacked there."""
    subprocess.run([tool, "--extract-elf", "all", Path(binary).resolve()], cwd=folder, check=True, capture_output=True)
    found = {}
    for file in Path(folder).glob("*.cubin"):
        code = re.search(r"sm_(\d+)", file.name)[1]
        found |= {(name, code): banks for name, banks in banks_of(file.read_bytes(), argument_bytes).items()}
    return found
