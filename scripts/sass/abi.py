"""Structs, enums and optimizers from the kernels' headers. A traced launch gets the memory that Rust would upload.

Offsets are those of kernels/abi_layout.h, which the compilers compare with the offsets in Rust.
"""

import re


class Abi:
    """Structs, enums and macros of the kernels' headers."""

    def __init__(self, kernels):
        layout, header = (kernels / "abi_layout.h").read_text(), (kernels / "abi.h").read_text()
        self.offsets = {(s, f): int(n) for s, f, n in re.findall(r"offsetof\((\w+), (\w+)\) == (\d+)", layout)}
        self.sizes = {s: int(n) for s, n in re.findall(r"sizeof\((\w+)\) == (\d+)", layout)}
        self.constants = {}
        for body in re.findall(r"enum \w+ \{([^#]*?)\};", re.sub(r"/\*.*?\*/", "", header, flags=re.S)):
            for name, value in re.findall(r"(\w+) = (\w+)", body):
                self.constants[name] = int(value) if value.isdigit() else self.constants[value]
        for name, value in re.findall(r"#define (\w+) (\w+)", header):
            try:
                self.constants[name] = int(value.rstrip("u"), 0)
            except ValueError:
                pass  # an include guard
        rows = re.findall(r"^OPTIMIZER\((\w+), (\w+), (\d+), \d+\)", (kernels / "optimizers.def").read_text(), re.M)
        self.optimizers = {name: (rule, int(fewest)) for name, rule, fewest in rows}
        self.kernels = kernels

    def __getitem__(self, name):
        return self.constants[f"INSTEP_{name}"]

    def first_close(self):
        """The distance from a threshold above which only the roots can tell a code (numeric/codes.h)."""
        below, above = re.search(r"BELOW = (\d+), ABOVE = (\d+);", (self.kernels / "numeric/codes.h").read_text()).groups()
        return (1 << 32) - int(below) - int(above)

    def argument_bytes(self, kernel):
        """The size of the argument of a kernel that steps or measures; no other kernel is traced."""
        return self.sizes["InstepStepLaunch" if kernel.startswith("instep_step_") else "InstepStepArgs"]

    def is_scaled(self, optimizer):
        """Whether norms of the whole parameter scale its change, so that there are two launches; kernels/numeric/scaled.h."""
        return " change(" in (self.kernels / f"rules/{optimizer}.h").read_text()

    def scalars(self, optimizer):
        """The scalars of a usual update: (type, value) in the order of the struct in the rule's header.

        Numbers are not zero, because a zero could leave a term out. Flags are off, except those that say that a part of
        the formula applies. If decay can be coupled or decoupled, it is decoupled, as in AdamW."""
        rule = self.optimizers[optimizer][0]
        text = (self.kernels / f"rules/{optimizer}.h").read_text()
        body = re.search(rf"struct {rule}Scalars \{{(.*?)\}};", text, re.S)[1]
        fields = re.findall(r"^    (float|double|uint32_t) ([\w, ]+);", body, re.M)
        named = [(kind, name) for kind, names in fields for name in names.split(", ")]
        decoupled = any(name == "lr_weight_decay" for _, name in named)
        applies = {"has_momentum", "rectified"}
        for kind, name in named:
            if kind == "uint32_t":
                yield "u32", int(name in applies)
            else:
                yield "f64" if kind == "double" else "f32", 0.0 if decoupled and name == "weight_decay" else 0.25
