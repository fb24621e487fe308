"""Tests what the interpreter waits for when it exits."""

from __future__ import annotations

import subprocess
import sys

HELD = """
import threading, time
from instep.torch import _futures

class Held:
    def __call__(self): pass

def hold(callback):
    time.sleep({held_s})
    del callback
    print("dropped", flush=True)

threading.Thread(target=hold, args=[_futures.awaited(Held())], daemon=True).start()
print("ended", flush=True)
"""


def output_of(held_s: float) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", HELD.format(held_s=held_s)], capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout.split()


def test_the_interpreter_ends_after_the_threads_that_hold_a_callback_have_dropped_it() -> None:
    assert output_of(0.3) == ["ended", "dropped"]


def test_a_callback_that_nobody_ever_drops_does_not_keep_it() -> None:
    assert output_of(1000) == ["ended"]
