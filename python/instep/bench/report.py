"""The results of the measurements, as a table and as CSV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from .candidates import Candidate
from .rounds import Spread, ratios

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A case: a number of tensors of the same length."""

    name: str
    tensors: int
    length: int

    @property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return self.tensors * self.length

    @property
    def title(self) -> str:
        """The case's name and sizes, as a text."""
        gradients, all_bytes = 4 * self.elements / MIB, 16 * self.elements / MIB
        return (
            f"{self.name}: {self.tensors} tensors of {self.length:,} elements"
            f" (in f32, {gradients:g} MiB of gradients, {all_bytes:g} MiB with parameters and states)"
        )


@dataclass
class Line:
    """One candidate in one case: its times, or the reason why it was not timed."""

    candidate: Candidate
    missing: Optional[str] = None
    times: list[float] = field(default_factory=list)
    """Milliseconds per step, one number per round."""
    to_ours: Optional[Spread] = None
    """The candidate's times divided by instep's, in the same rounds."""

    @property
    def spread(self) -> Spread:
        """Milliseconds per step."""
        return Spread.of(self.times)


@dataclass
class Results:
    """All lines of a case."""

    case: Case
    lines: list[Line]

    @property
    def formats(self) -> list[str]:
        """The formats of the candidates, in the order of the lines."""
        return list(dict.fromkeys(line.candidate.format for line in self.lines))

    def compare(self) -> None:
        """Sets the ratios, after all candidates are timed."""
        ours = {line.candidate.format: line.times for line in self.lines if line.candidate.is_ours}
        for line in self.lines:
            if line.times:
                line.to_ours = ratios(line.times, ours[line.candidate.format])


def table(results: Results) -> str:
    """Returns the results of a case as a table with units."""
    case = results.case
    head = f"  {'':<28}{'ms per step (range)':<30}{'ns per element':<17}time / instep's (range)"
    rounds = max(len(line.times) for line in results.lines)
    text = [f"{case.title}; {rounds} round{'s' * (rounds != 1)}", head]
    for format in results.formats:
        text.append(f"  {format}")
        for line in (line for line in results.lines if line.candidate.format == format):
            name = f"    {line.candidate.name:<26}"
            if line.to_ours is None:
                text.append(f"{name}{line.missing}")
                continue
            each = line.spread.median * 1e6 / case.elements
            ratio = "1" if line.candidate.is_ours else line.to_ours.show(2)
            text.append(f"{name}{line.spread.show(3):<30}{each:<17.3f}{ratio}")
    return "\n".join(text)


def csv(head: list[str], threads: int, all_results: list[Results]) -> str:
    """Returns all results as CSV, with one line per measured quantity. A comment names each candidate that was not
    timed.
    """
    lines = [f"# {line}" for line in head]
    rows = ["candidate,format,case,elements,threads,quantity,median,min,max"]
    for results in all_results:
        for line in results.lines:
            candidate, case = line.candidate, results.case
            if line.to_ours is None:
                lines.append(f"# {case.name}, {candidate.format}: {candidate.name}: {line.missing}")
                continue
            key = f'"{candidate.name}",{candidate.format},{case.name},{case.elements},{threads}'
            rows.append(f"{key},ms_per_step,{line.spread.row(5)}")
            rows.append(f"{key},times_instep,{line.to_ours.row(5)}")
    return "\n".join(lines + rows) + "\n"
