from collections.abc import Sequence
from typing import Optional, TypedDict

VERSION: str
NORM_LIMBS: int
MAX_THREADS: int

Value = float | bool | tuple[float, float]
Factors = tuple[int, float, int, int]

class Bound(TypedDict):
    params: list[int]
    grads: list[int]
    states: list[int]
    scales: list[int]
    master: int
    counts: int
    carried: int

def descriptors() -> list[tuple[str, str, list[tuple[str, Value]], Optional[str], Optional[str], bool, str]]: ...
def state_names(name: str, hyper: dict[str, Value]) -> list[str]: ...

class Norm:
    def __init__(self, gpu_ordinal: Optional[int]) -> None: ...
    def begin(self, factors: Factors, stream: int) -> None: ...
    def sum(self, stream: int) -> tuple[int, int]: ...
    def decide(self, max_norm: Optional[float], skip_nonfinite: bool, stream: int) -> None: ...
    def decision(self) -> tuple[float, float, bool]: ...

class Step:
    def __init__(
        self,
        groups: Sequence[tuple[str, dict[str, Value]]],
        params: Sequence[tuple[int, int, int, int, int]],
        arena: int,
        formats: tuple[str, str, str, str],
        seed: Optional[int],
        after: str,
        threads: int,
        openmp: int,
        gpu_ordinal: Optional[int],
    ) -> None: ...
    def step(self, tensors: Bound, factors: Factors, stream: int) -> None: ...
    def add_norm(self, tensors: Bound, norm: Norm, stream: int) -> None: ...
    def step_decided(self, tensors: Bound, norm: Norm, stream: int) -> None: ...
    def set_hyper(self, group: int, key: str, hyper: dict[str, Value]) -> None: ...
    def progress(self) -> list[tuple[int, float]]: ...
    def set_progress(self, progress: list[tuple[int, float]]) -> None: ...
