"""Runs steps on the host while a device works: gradients are copied down, a thread steps, parameters are copied up.

    autograd's thread      mark, copy down ------------------------> next parameters ...
    queue of downloads         [bucket 0][bucket 1][bucket 2]
    the worker's thread            [norm or step 0][1][2]  decision  [step 2][1][0]
    queue of uploads                                                  [bucket 2][1][0]
    trainer's thread                                            forward: waits, module by module

Threads. Autograd's thread, or a thread of DDP or FSDP, hands gradients over (`take`, `send`) and continues. These calls
wait only for free space in the ring. The worker is one Python thread for each optimizer. It waits for a bucket's copy,
then calls the native norm and step. These native calls run on the library's threads without the GIL. The trainer's
thread waits in `gate`, before the forward pass of a module. The thread waits for the steps of the buckets that have the
module's parameters. The device, not the thread, waits for the uploads of these buckets.

Memory. A parameter on a device has a mirror in page-locked memory. The step updates the mirror, which is then copied
up. Gradients are copied down into a ring of page-locked memory. If a pass needs a decision over all gradients (a clip,
a scaler, `skip_nonfinite`), and gradients are not added on the host (``accumulate="host"``), the ring has room for all
gradients. Otherwise the ring may be smaller, and backward waits while the ring is full. Parameters that are already on
the host (FSDP's with `CPUOffloadPolicy`) need no mirror and no ring. The step reads their gradients in the memory where
FSDP has put them.

Order. Events and the worker's queue keep the work on one bucket in order. This work is the write of its gradients, the
copy down, the norm or the step, the copy up, and the next forward pass. If several buckets are ready, the worker first
steps the bucket that the next forward pass is likely to need first. Usually backward finishes the gradients of this
bucket last. If a pass needs a decision, norms are added as buckets arrive, and all steps run after the decision. A pass
is a call of `begin`, then a call of `send` for each bucket, then a call of `end`. `prepare` waits for all steps of the
previous pass, so no step runs while hyperparameters and states are read.

Failures. If the worker raises, the trainer's next call of the engine raises the same error, with the number of buckets
that were stepped. If backward has raised, its pass is still open when the next forward pass begins. The engine then
drops the open pass, and if buckets were stepped, the forward pass raises.

The Rust library has another engine, `StepperBuilder::offload`. The Rust engine makes its own buckets, and enqueues
their ops on the driver's streams in advance. In the engine of this file, PyTorch's autograd decides when gradients
arrive. Both engines call the same native step and norm.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor

from ._engine import Batch, Engine
from ._offload_bucket import Arrival, Bucket, Decider, Pass, as_laid
from ._offload_device import Device, Event
from ._offload_ring import Ring
from ._offload_threads import Lane, Task


def in_backward() -> bool:
    """Whether the calling thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Worker:
    """The thread that steps, and the number of its pending tasks."""

    def __init__(self, bind: Task) -> None:
        self._lane, self._home = Lane("instep steps", bind), os.getpid()
        self._idle = threading.Condition()
        self._pending, self.is_closed = 0, False

    def put(self, task: Task) -> None:
        """Adds a task, which the thread runs after all earlier tasks. The task must not raise."""
        self.refuse_child()
        with self._idle:
            self._pending += 1
        self._lane.put(partial(self._run, task))

    def _run(self, task: Task) -> None:
        try:
            task()
        finally:
            with self._idle:
                self._pending -= 1
                if self._pending == 0:
                    self._idle.notify_all()

    def wait(self) -> None:
        """Waits for all tasks."""
        if self._pending:
            self.refuse_child()
            with self._idle:
                while self._pending:
                    self._idle.wait()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this worker's thread."""
        return self._lane.is_current

    def refuse_child(self) -> None:
        """Raises in a forked child, because the child does not have this thread."""
        if os.getpid() != self._home:
            raise RuntimeError("optimizer: made by a process that has forked since; make it in the child, or use spawn")

    def refuse_closed(self) -> None:
        """Raises after `close`, because no thread would run further work."""
        if self.is_closed:
            raise RuntimeError("optimizer: closed, so nothing steps this gradient; call close() after the last backward")

    def close(self) -> None:
        """Ends the thread after the last task."""
        self.is_closed = True
        self._lane.close()


class Offload:
    """The engine of one optimizer, with its threads, buckets and ring."""

    def __init__(
        self,
        engine: Callable[[], Engine],
        device: Device,
        buckets: Sequence[Bucket],
        names: dict[int, str],
        decider: Optional[Decider],
        ring: Optional[Ring],
        scale: Optional[Tensor] = None,
    ) -> None:
        """``scale`` is page-locked memory for a loss scale."""
        self.engine, self.device, self.decider, self.ring, self.scale = engine, device, decider, ring, scale
        self.names = names
        self.buckets = list(buckets)
        self.place_of = {id(param): (bucket, k) for bucket in buckets for k, param in enumerate(bucket.params)}
        # For each parameter with a mirror, the address and version that the parameter had when the two were last equal.
        self.same: dict[int, tuple[int, int]] = {}
        self.worker = Worker(device.bind)
        self.is_open = False
        """Whether a backward pass is under way."""
        self.goes_on = False
        """Whether the next backward pass adds to the gradients of the last one."""
        self.current = Pass()
        self.late: list[Bucket] = []
        """Buckets for which no forward pass has waited since their last step."""
        self._outcome: Optional[tuple[float, float, bool]] = None
        self._ready: list[tuple[int, Bucket, Pass, list[Batch]]] = []
        """Buckets that the worker may step, ordered by when the next forward pass is likely to need them."""
        self._coming = 0
        """The number of buckets that were sent but not yet received by the worker."""
        self._order: list[Bucket] = []
        self._asked: list[Bucket] = []
        self._guard = threading.Lock()
        self._failure: Optional[BaseException] = None

    # The methods for the trainer's and autograd's threads.

    def prepare(self) -> bool:
        """Waits for all running work, before a backward pass. Returns True if the pass begins a new step, and False if
        it adds to the gradients of the previous pass.
        """
        self.worker.refuse_closed()
        if self.is_open:
            self.abandon()
        if self.goes_on:
            self.goes_on, self.is_open = False, True
            return False
        self.late = [bucket for bucket in self.buckets if not bucket.is_settled]
        self.wait()
        if self._asked:
            self._order, self._asked = self._asked, []
        for bucket in self.buckets:
            if bucket.uploaded is not None:
                bucket.uploaded.wait()  # After this, no copy reads the mirrors.
                bucket.uploaded = None
        self.follow()
        return True

    def begin(self, factors: tuple[int, float], scale: Optional[Tensor] = None) -> None:
        """Opens a pass. The steps of the pass divide gradients by the loss scale ``scale``, which may be on any device."""
        self.current = current = Pass(self.current.number + 1, factors)
        if scale is not None:
            assert self.scale is not None, "a scaler comes with a place for its scale"
            current.scale = self.scale
            source = scale.detach().clone()
            current.keeps.append(source)
            marked = [self.device.mark([source])]
            current.scaled = [self.device.down([(current.scale, source)], marked, (current.number, None))]
        self.is_open = True
        self.worker.put(partial(self._guarded, partial(self._begin, current)))

    def follow(self) -> None:
        """If code other than a step has written a parameter, copies the new values to its mirror."""
        for bucket in self.buckets:
            for param, mirror in zip(bucket.params, bucket.mirrors or ()):
                now = (param.data_ptr(), param._version)
                if self.same.get(id(param)) != now:
                    mirror.copy_(param.detach())
                    self.same[id(param)] = now

    def take(self, param: Tensor, grad: Optional[Tensor], is_last: bool = True) -> None:
        """Receives the gradient of a parameter. If the gradient is None, the parameter is not stepped. The last
        gradient of a bucket starts the bucket's copies.
        """
        bucket, k = self.place_of[id(param)]
        with self._guard:
            if k in bucket.arrived:
                raise RuntimeError(
                    f"{self.names.get(id(param), 'parameter')}: has a gradient twice in one backward, and its first one is "
                    "stepped with; use checkpoint(use_reentrant=False), or no_sync() for all but the last backward"
                )
            bucket.arrived[k] = grad
            if len(bucket.arrived) < len(bucket.params):
                return
            arrived, bucket.arrived = bucket.arrived, {}
        self.send(bucket, [arrived[k] for k in range(len(bucket.params))], is_last=is_last)

    def send(
        self, bucket: Bucket, grads: Sequence[Optional[Tensor]], events: Sequence[Event] = (), is_last: bool = True
    ) -> None:
        """Starts the copies of a bucket's gradients. If the gradients are already in the host's memory, they are
        complete after ``events``.
        """
        self._raise_failure()
        if is_last:
            bucket.is_settled = False
            bucket.ready.clear()
        if bucket.mirrors is None:
            arrival = Arrival(bucket, list(grads), events, [])
        elif all(grad is None for grad in grads):
            arrival = Arrival(bucket, list(grads), (), [], None, is_last)
        else:
            assert self.ring is not None, "mirrors come with a ring"
            slot = self.ring.take(bucket.gradient_bytes)
            places = bucket.views(self.ring.memory, slot.start)
            pairs = [(place, as_laid(grad, place)) for place, grad in zip(places, grads) if grad is not None]
            sources = [source for _, source in pairs]
            label = (self.current.number, bucket.index)
            self.device.note("taken", (label, slot.start, slot.end))
            copied = self.device.down(pairs, [self.device.mark(sources)], label)
            found = [place if grad is not None else None for place, grad in zip(places, grads)]
            arrival = Arrival(bucket, found, [copied], sources, slot, is_last)
        with self._guard:
            self._coming += 1
        self.worker.put(partial(self._take_in, self.current, arrival))

    def end(self, is_last: bool = True, drops: bool = False) -> None:
        """Closes the pass. If some gradients of a bucket are missing, the bucket is sent without them. If the pass
        needs a decision and this is its last backward pass, the worker then decides and runs the steps.

        With ``drops``, this rank takes part in the decision, but steps no bucket after it. Buckets of a pass without a
        decision are stepped once they are sent, even with ``drops``.
        """
        for bucket in self.buckets:
            with self._guard:
                arrived, bucket.arrived = bucket.arrived, {}
            if arrived or (is_last and bucket.summed and bucket.ready.is_set()):
                self.send(bucket, [arrived.get(k) for k in range(len(bucket.params))], is_last=is_last)
        self.is_open, self.goes_on = False, not is_last
        if is_last:
            self.worker.put(partial(self._end, self.current, drops))

    def gate(self, buckets: Iterable[Bucket]) -> None:
        """Waits for the steps of these buckets before their parameters are read, and makes the device wait for the
        uploads.
        """
        for bucket in buckets:
            if bucket.is_settled:
                continue
            if in_backward():
                return  # In a recomputation, parameters have no gradient yet, or autograd detects the step.
            if self.is_open:
                self.abandon()
            self.worker.refuse_child()
            bucket.ready.wait()
            self._raise_failure()
            self._settle(bucket)
            self._asked.append(bucket)
            self.device.note("read", (self.current.number, bucket.index))

    def _settle(self, bucket: Bucket) -> None:
        if bucket.uploaded is not None:
            self.device.wait(bucket.uploaded)
        if not in_backward():
            self._count_write(bucket)
        bucket.is_settled = True

    def _count_write(self, bucket: Bucket) -> None:
        """Increments version counters, so that autograd refuses a backward pass through values that were read too
        early.
        """
        params = bucket.params if bucket.mirrors is not None else []
        torch.autograd.graph.increment_version(params)
        for param in params:
            self._own_write(param)

    def _own_write(self, param: Tensor) -> None:
        address, version = self.same[id(param)]
        self.same[id(param)] = address, version + 1

    def wait(self) -> None:
        """Waits for all running work, and makes later work of the device wait for the last upload."""
        if self.worker.is_current:
            return  # The worker itself gets here, when a first step shows its states.
        if self.is_open and not in_backward():
            self.abandon()
        self.worker.wait()
        self._raise_failure()
        for bucket in self.buckets:
            if not bucket.is_settled and bucket.ready.is_set():
                self._settle(bucket)

    def decision(self) -> Optional[tuple[float, float, bool]]:
        """Returns the decision of the last pass: the norm, the clip coefficient, and whether steps were skipped. Waits
        only for this decision, not for steps.
        """
        current = self.current
        if self.decider is None or current.number == 0 or self.is_open or self.goes_on:
            return self._outcome
        current.decided.wait()
        self._raise_failure()
        return self._outcome if current.outcome is None else current.outcome  # A dropped pass has no outcome.

    def abandon(self) -> None:
        """Drops a pass after its backward has ended with an error."""
        self.is_open = self.goes_on = False
        current = self.current
        for bucket in self.buckets:
            bucket.arrived.clear()
        self.worker.put(partial(self._drop, current))
        self.worker.wait()
        self._raise_failure()
        if current.stepped:
            raise RuntimeError(
                f"backward: ended with an error after {self._told(current.stepped)} were stepped, so parameters are of two "
                "steps; load a checkpoint. With max_norm= or skip_nonfinite=True nothing is stepped before backward has ended"
            )

    def settle(self) -> None:
        """Waits for all running work, and clears a failure. Call this method before states are loaded."""
        self._failure = None
        try:
            self.wait()
        except RuntimeError:
            self._failure = None

    def grow(self, buckets: Sequence[Bucket], holds_all: bool) -> None:
        """Adds further buckets, and makes the ring large enough for them. No work may be running."""
        assert self.ring is not None, "mirrors come with a ring"
        self.buckets += buckets
        self.place_of |= {id(param): (bucket, k) for bucket in buckets for k, param in enumerate(bucket.params)}
        sizes = [bucket.gradient_bytes for bucket in self.buckets]
        needed = sum(sizes) if holds_all else max(sizes)
        if needed > self.ring.size:
            old, self.ring = self.ring, Ring(self.device.page_locked(needed))
            for bucket in self.buckets:
                bucket.forget_views()
            if old.size:
                self.device.unlock(old.memory)

    @property
    def is_closed(self) -> bool:
        """Whether the threads have ended."""
        return self.worker.is_closed

    def close(self) -> None:
        """Ends the threads after all running work, even if a step has failed."""
        if self.is_open and in_backward():
            raise RuntimeError(
                "optimizer: close() inside backward would leave its steps out; call it after the last backward"
            )
        if self.goes_on:
            self.abandon()
        try:
            self.wait()
        finally:
            self.worker.close()
            self.device.close()

    def _told(self, buckets: Sequence[Bucket]) -> str:
        names = [self.names.get(id(bucket.params[0]), "parameter") for bucket in buckets]
        listed = f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
        return f"{len(buckets)} of {len(self.buckets)} buckets{listed}"

    def _raise_failure(self) -> None:
        if self._failure is not None:
            told = self._told(self.current.stepped)
            raise RuntimeError(
                f"offload: {type(self._failure).__name__} after {told} were stepped: {self._failure}; "
                "load a checkpoint and the optimizer's state"
            ) from self._failure

    # The methods for the worker's thread.

    def _guarded(self, task: Task, bucket: Optional[Bucket] = None) -> None:
        """Runs a task, unless an earlier task has failed. Stores the task's error for the trainer's thread. After a
        failure, threads that wait for the bucket may continue.
        """
        try:
            if self._failure is None:
                task()
                return
        except BaseException as error:
            self._failure = error
        if bucket is not None:
            self._let_go(bucket)

    def _begin(self, current: Pass) -> None:
        for event in current.scaled:
            event.wait()
        current.keeps.clear()
        if self.decider is not None:
            scale = 0 if current.scale is None else current.scale.data_ptr()
            self.decider.norm().begin((*current.factors, scale, 0))

    def _take_in(self, current: Pass, arrival: Arrival) -> None:
        with self._guard:
            self._coming -= 1
        arrival.bucket.slot = arrival.slot or arrival.bucket.slot
        while self._ready and not all(event.is_done() for event in arrival.copied):
            self._step_next()
        for event in arrival.copied:
            event.wait()
        arrival.keeps.clear()
        self._guarded(partial(self._arrived, current, arrival), arrival.bucket)

    def _arrived(self, current: Pass, arrival: Arrival) -> None:
        bucket, label, grads = arrival.bucket, (current.number, arrival.bucket.index), arrival.grads
        if bucket.sums:
            self._add(bucket, grads)
            if not arrival.is_last:
                return
            grads = [one if k in bucket.summed else None for k, one in enumerate(bucket.sums)]
            bucket.summed.clear()
        batches = [batch for batch in self.engine().route(bucket.params).batches(grads) if batch.has_any]
        if self.decider is None:
            self._ready.append((self._rank(bucket), bucket, current, batches))
            self.worker.put(self._step_or_take_in)
            return
        self.device.note("norm", label)
        bucket.measured = [(batch, self.decider.norm().add(self.engine(), batch)) for batch in batches]
        current.measured.append(bucket)

    def _rank(self, bucket: Bucket) -> int:
        """The likely position of a bucket in the next forward pass: its position in the last forward pass, or else in
        the reverse order of backward.
        """
        ranks = {id(one): k for k, one in enumerate(self._order)}
        return ranks.get(id(bucket), len(ranks) + len(self.buckets) - bucket.index)

    def _step_or_take_in(self) -> None:
        """Receives the buckets that were sent in the meantime, then steps the bucket that the next forward pass is
        likely to need first.
        """
        if self._coming:
            self.worker.put(self._step_or_take_in)
        else:
            self._step_next()

    def _step_next(self) -> None:
        if self._ready:
            first = min(self._ready, key=lambda ready: ready[0])
            self._ready.remove(first)
            _, bucket, current, batches = first
            self._guarded(partial(self._step, current, bucket, batches), bucket)

    def _step(self, current: Pass, bucket: Bucket, batches: Sequence[Batch]) -> None:
        self.device.note("step begins", (current.number, bucket.index))
        for batch in batches:
            self.engine().step(batch, (*current.factors, 0, 0))
        self._stepped(current, bucket, batches)

    def _add(self, bucket: Bucket, grads: Sequence[Optional[Tensor]]) -> None:
        for k, grad in enumerate(grads):
            if grad is not None:
                bucket.sums[k].add_(grad) if k in bucket.summed else bucket.sums[k].copy_(grad)
                bucket.summed.add(k)
        self._give_back(bucket)

    def _end(self, current: Pass, drops: bool) -> None:
        if self.decider is None:
            return
        decided = None
        try:
            # This runs also after a failure, because other ranks wait for this rank's sums.
            norm = self.decider.norm()
            decided = norm.decide(self.decider.max_norm, self.decider.skip_nonfinite, self.decider.spread)
            self._outcome = current.outcome = decided.decision()
        except BaseException as error:
            self._failure = self._failure or error
        self.device.note("decision", (current.number, None))
        current.decided.set()
        measured = sorted(current.measured, key=self._rank)
        for bucket in measured:
            if drops or decided is None:
                self._let_go(bucket)
                continue
            self._guarded(partial(self._step_decided, current, bucket, decided), bucket)

    def _step_decided(self, current: Pass, bucket: Bucket, decided: Any) -> None:
        self.device.note("step begins", (current.number, bucket.index))
        for batch, prepared in bucket.measured:
            self.engine().step_decided(batch, prepared, decided)
        assert current.outcome is not None, "steps come after their decision"
        self._stepped(current, bucket, [batch for batch, _ in bucket.measured], not current.outcome[2])

    def _stepped(self, current: Pass, bucket: Bucket, batches: Iterable[Batch], has_changed: bool = True) -> None:
        """Runs after a bucket's step. Starts the upload of the parameters. The bucket's gradients are not read again."""
        label = (current.number, bucket.index)
        self.device.note("step ends", label)
        if has_changed:
            current.stepped.append(bucket)
        if bucket.mirrors is not None:
            stepped = {
                id(batch.arena.params[index])
                for batch in batches
                for index, grad in zip(batch.indices, batch.grads)
                if grad is not None
            }
            pairs = []
            for param, mirror in zip(bucket.params, bucket.mirrors):
                if id(param) in stepped:
                    self._own_write(param)  # `Engine` has increased the parameter's version.
                    pairs.append((param.data, mirror))
            if has_changed and pairs:
                bucket.uploaded = self.device.up(pairs, (), label)
        self._let_go(bucket)

    def _let_go(self, bucket: Bucket) -> None:
        """Records that no step of the bucket is under way, and returns the memory of its gradients to the ring. The
        upload of the bucket's parameters may still be running.
        """
        bucket.measured = []
        self._give_back(bucket)
        bucket.ready.set()

    def _give_back(self, bucket: Bucket) -> None:
        if bucket.slot is not None:
            slot, bucket.slot = bucket.slot, None
            self.device.note("given back", (bucket.index, slot.start, slot.end))
            slot.give_back()

    def _drop(self, current: Pass) -> None:
        self._ready.clear()
        current.decided.set()
        for bucket in self.buckets:
            bucket.summed.clear()
            self._let_go(bucket)
