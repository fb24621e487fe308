"""torch_gpu.py from end to end without a GPU: PyTorch's side on the CPU, instep's on the software GPU.

The parts of PyTorch that need CUDA are replaced: tensors are on the CPU, and events read the host's clock, so no figure
means anything. instep steps copies of the tensors in the driver's memory. Before each pass, the tensors are copied
there, and after the pass they are copied back. torch_gpu.py itself decides, compares, counts and writes.
`scripts/software-gpu.sh --torch PYTHON` runs it.
"""

import contextlib
import ctypes
import os
import time
import types

import torch

import torch_gpu

MIB = 1 << 20


class Driver:
    """Makes the calls to libcuda.so.1 that PyTorch would make."""

    def __init__(self):
        self.lib = ctypes.CDLL(os.environ["INSTEP_CUDA"])
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        assert status == 0, f"{name}: status {status}"

    def stream(self):
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def copy_in(self, address, tensor):
        self.call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(tensor.data_ptr()), bytes_of(tensor))

    def copy_out(self, address, tensor):
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(tensor.data_ptr()), address, bytes_of(tensor))

    def allocate(self, tensor):
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), bytes_of(tensor))
        self.copy_in(address, tensor)
        return address

    def free(self, address):
        self.call("cuMemFree_v2", address)


def bytes_of(tensor):
    return ctypes.c_size_t(tensor.numel() * tensor.element_size())


class Instep(torch_gpu.Instep):
    """instep's side. Each tensor that instep uses has a copy in the driver's memory."""

    def __init__(self, lib, number, stream, *rest):
        self.copies, self.stream = [], stream
        super().__init__(lib, number, stream, *rest)

    def address(self, tensor):
        self.copies.append((tensor, DRIVER.allocate(tensor)))
        return self.copies[-1][1].value

    def step_all(self):
        for tensor, address in self.copies:
            DRIVER.copy_in(address, tensor)
        super().step_all()
        DRIVER.call("cuStreamSynchronize", self.stream.handle)
        for tensor, address in self.copies:
            DRIVER.copy_out(address, tensor)

    def close(self):
        super().close()
        for _, address in self.copies:
            DRIVER.free(address)


class Stream:
    def __init__(self, _device):
        self.handle = DRIVER.stream()
        self.cuda_stream = self.handle.value


class Event:
    """Reads the host's clock. `query` returns False, so no sample counts as queued too late."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at_s = time.perf_counter()

    def query(self):
        return False

    def elapsed_time(self, end):
        return (end.at_s - self.at_s) * 1e3


class WithoutCuda(types.ModuleType):
    """PyTorch, with the parts below replaced."""

    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        set_device=lambda _: None,
        get_device_properties=lambda _: types.SimpleNamespace(name="software GPU", L2_cache_size=MIB),
        empty_cache=lambda: None,
        synchronize=lambda: None,
        stream=contextlib.nullcontext,
        Stream=Stream,
        Event=Event,
        _sleep=lambda _: None,
    )

    @staticmethod
    def device(*_):
        return torch.device("cpu")

    def __getattr__(self, name):
        return getattr(torch, name)


if __name__ == "__main__":
    DRIVER = Driver()
    torch_gpu.torch, torch_gpu.Instep = WithoutCuda("torch"), Instep
    torch_gpu.main()
