"""A CSV file of figures that is whole at every moment, and where a script of this folder is: what needs no PyTorch.

The file is written beside its place and renamed after each change, so a run that is cut off leaves what it has measured.
"""

import os
import pathlib
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
# The repository, or the folder of a bundle, in which all scripts lie side by side.
ROOT = next((folder for folder in HERE.parents if (folder / "Cargo.toml").is_file() and HERE.name == "peers"), HERE)


def commit():
    """What the sources or the bundle are of."""
    packed = ROOT / "commit"
    if packed.is_file():
        return packed.read_text().strip()
    told = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


class Rows:
    """Lines in groups, below a head; a group is replaced as a whole while its medians grow more certain."""

    def __init__(self, path, head):
        self.path, self.head, self.groups = path, head, {}
        self.save()

    def put(self, group, lines):
        self.groups[group] = lines
        self.save()

    def save(self):
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(self.path.name + ".new")
        lines = self.head + [line for lines in self.groups.values() for line in lines]
        beside.write_text("\n".join(lines) + "\n")
        os.replace(beside, self.path)
