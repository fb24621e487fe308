"""Processes that form a gloo group and run the functions of a module, as torchrun would start them."""

import importlib
import multiprocessing
import os
import socket
import traceback
from typing import Any

import torch
import torch.distributed as dist

MOST_SECONDS = 600
"""The limit on a start and on a function. On a busy machine with a slow disk, importing PyTorch alone can take minutes."""


def _serve(rank: int, world_size: int, port: int, pipe: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    pipe.send(None)
    while True:
        module, name, kwargs = pipe.recv()
        try:
            torch.manual_seed(1000 + rank)
            pipe.send((True, getattr(importlib.import_module(module), name)(rank, world_size, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Ranks:
    """A group of processes, which start at the first call of `run`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.pipes: list[Any] = []
        self.processes: list[Any] = []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()  # If the process ends, `ours` then reads an end of file.
            self.pipes.append(ours)
            self.processes.append(process)
        try:
            for pipe in self.pipes:
                assert pipe.poll(MOST_SECONDS), f"the processes have not started within {MOST_SECONDS} s"
                pipe.recv()
        except BaseException:
            self.close()
            raise

    def run(self, module: str, name: str, **kwargs: Any) -> list[Any]:
        """Runs a function on every rank. Raises if the function fails on any rank."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((module, name, kwargs))
        answers = []
        failed = []
        for rank, pipe in enumerate(self.pipes):
            # A rank may wait for another rank that has failed.
            if not pipe.poll(0 if failed else MOST_SECONDS):
                failed.append(f"rank {rank}: {name} did not end within {MOST_SECONDS} s")
                continue
            try:
                answers.append(pipe.recv())
            except EOFError:
                failed.append(f"rank {rank}: {name} ended its process")
        if failed:
            self.close()
        failed += [text for ok, text in answers if not ok]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def close(self) -> None:
        """Ends the processes. The next call of `run` starts new processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []
