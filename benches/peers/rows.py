"""Writes figures to a CSV file that is complete at every moment, and finds the repository's folder and commit. This
module needs no PyTorch.

The file is written to another name and renamed after each change, so a run that is cut off leaves all its measurements.
"""

import os
import pathlib
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
# The repository, or the folder of a bundle, in which all scripts lie side by side.
ROOT = next((folder for folder in HERE.parents if (folder / "Cargo.toml").is_file() and HERE.name == "peers"), HERE)


def commit():
    """The commit of the sources or of the bundle."""
    packed = ROOT / "commit"
    if packed.is_file():
        return packed.read_text().strip()
    told = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


class Rows:
    """A header, and groups of lines. A group is replaced as a whole after each round."""

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
