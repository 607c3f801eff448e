"""GPU for vLLM 0.32.0 on a CPU: its own worker and runner for GPUs, with memory that sleep unmaps.

    with FakeGpu() as gpu:  # in a process as of `interpreted`, before it imports vLLM
        llm = vllm.LLM(...)
        gpu.mapped          # bytes that vLLM's allocator has

The platform says that it is like CUDA. Its tensors are on the CPU; those that are created in a
memory pool have pages of their own, which vLLM's allocator maps and unmaps as it does on a GPU.
New pages are full of NaN, and a process that touches unmapped ones dies. Attention, and operations
that are no Triton kernels, are those for CPUs; there are no streams and no CUDA graphs.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LIBC: Any = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_READ_WRITE, _PRIVATE_ANONYMOUS = 3, 0x22
_PAGE = 4096


class FakeGpu(TorchFunctionMode):
    """Device `cuda` with `total` bytes of memory."""

    def __init__(self, total: int = 2**28) -> None:
        super().__init__()
        self.total = total
        self.mapped = 0
        self._pools = 0  # that are entered
        self._allocate: Callable[[tuple[int, int, int, int]], None]  # vLLM's

    def __enter__(self) -> Self:
        _replace_torch(self)
        _replace_vllm(self)
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` for the CPU if it asks for `cuda`; give new tensors of pools their pages."""
        if func is torch.device:
            return func(*args, **kwargs or {})
        name, options = getattr(func, "__name__", ""), dict(kwargs or {})
        asked = options.get("device"), *(args[1:2] if name == "to" else args)
        on_gpu = any(_is_gpu(value) for value in asked)
        if name in ("cuda", "pin_memory"):
            return args[0]
        options.pop("pin_memory", None)
        if on_gpu:
            args = tuple(torch.device("cpu") if _is_gpu(value) else value for value in args)
            if "device" in options:
                options["device"] = torch.device("cpu")
        result = func(*args, **options)
        is_new = isinstance(result, Tensor) and not any(result is value for value in args)
        return self._on_pages(result) if on_gpu and self._pools and is_new else result

    def _on_pages(self, value: Tensor) -> Tensor:
        """Return a copy of a new tensor (N, ...) in pages that vLLM's allocator knows."""
        num_bytes = value.untyped_storage().nbytes()
        size = -(-num_bytes // _PAGE) * _PAGE
        if size == 0:
            return value
        pointer = _LIBC.mmap(None, size, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        self.map(0, size, pointer, pointer)
        self._allocate((0, size, pointer, pointer))
        with torch._C.DisableTorchFunction():
            memory = (ctypes.c_char * num_bytes).from_address(pointer)
            storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            layout = value.storage_offset(), value.shape, value.stride()
            return torch.empty(0, dtype=value.dtype).set_(storage, *layout).copy_(value)

    def connect(self, allocate: Callable[..., None], _: Any) -> None:
        """Tell `allocate` of new pages."""
        self._allocate = allocate

    def map(self, device: int, size: int, pointer: int, handle: int) -> None:
        """Allow access to pages, which hold no value yet."""
        del device, handle
        assert _LIBC.mprotect(pointer, size, _READ_WRITE) == 0
        ctypes.memset(pointer, self._fill(pointer), size)
        self.mapped += size

    def _fill(self, pointer: int) -> int:
        """Return the byte of new pages: NaN for weights, a finite number for caches.

        Attention for CPUs multiplies values after the end of a context by 0.
        """
        from vllm.device_allocator.cumem import CuMemAllocator

        known = CuMemAllocator.get_instance().pointer_to_data.get(pointer)
        return 0x41 if known is not None and known.tag == "kv_cache" else 0xFF

    def unmap(self, device: int, size: int, pointer: int, handle: int) -> None:
        """End the process at its next access to pages."""
        del device, handle
        assert _LIBC.mprotect(pointer, size, 0) == 0
        self.mapped -= size

    @contextmanager
    def pool(self, _: Any) -> Iterator[None]:
        """Allocate pages for the tensors that the block creates."""
        self._pools += 1
        yield
        self._pools -= 1


def _is_gpu(value: object) -> bool:
    """Return True for what names the device `cuda` where torch takes a device."""
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


class _Stream:
    """Stream or event of a device that computes at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


def _nothing(*_: Any, **__: Any) -> Any:
    return None


def _replace_torch(gpu: FakeGpu) -> None:
    """Let torch's functions for accelerators work without one."""
    stream = _Stream()
    free = {"get_memory_info": lambda *_: (gpu.total - gpu.mapped, gpu.total)}
    numbers = {"device_count": lambda: 1, "current_device_index": lambda: 0}
    peaks = dict.fromkeys(("max_memory_allocated", "memory_reserved"), lambda *_: 0)
    stats = {"memory_stats": lambda *_: {}, **peaks}
    names = ("synchronize", "empty_cache", "empty_host_cache", "set_device_index")
    ignored = dict.fromkeys((*names, "reset_peak_memory_stats"), _nothing)
    for name, function in {**free, **numbers, **stats, **ignored}.items():
        setattr(torch.accelerator, name, function)
    torch.cuda.Stream = torch.cuda.Event = torch.Event = _Stream
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda *_: nullcontext()
    torch.cuda.set_stream = torch.cuda.synchronize = torch.cuda.empty_cache = _nothing
    memory: Any = torch.cuda.memory
    memory.CUDAPluggableAllocator = lambda *_: SimpleNamespace(_allocator=None)
    memory.MemPool = lambda *_: SimpleNamespace(snapshot=list)
    memory.use_mem_pool = gpu.pool
    memory.get_allocator_backend = lambda: "native"
    torch._C._accelerator_setAllocatorSettings = _nothing
    torch._C._accelerator_getAllocatorSettings = str


def _replace_vllm(gpu: FakeGpu) -> None:
    """Give vLLM a platform, and the compiled parts that its build for CPUs lacks."""
    modules: dict[str, Any] = {}
    for name in ("vllm.triton_utils.importing", "vllm.cumem_allocator"):
        modules[name] = sys.modules[name] = ModuleType(name)
    importing, allocator = modules.values()
    importing.HAS_TRITON = True  # vLLM asks for a GPU
    importing.TritonPlaceholder = importing.TritonLanguagePlaceholder = object
    allocator.init_module = gpu.connect
    allocator.python_create_and_map, allocator.python_unmap_and_release = gpu.map, gpu.unmap
    import vllm.platforms as platforms
    from vllm.platforms.interface import PlatformEnum

    cpu: Any = import_module("vllm.platforms.cpu")

    class Platform(cpu.CpuPlatform):
        _enum = PlatformEnum.OOT
        device_name = device_type = "cuda"
        device_control_env_var = "CUDA_VISIBLE_DEVICES"
        is_cuda_alike = is_sleep_mode_available = lambda _: True
        check_if_supports_dtype = set_device = classmethod(_nothing)
        get_device_total_memory = classmethod(lambda *_: gpu.total)

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            vllm_config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
            vllm_config.cache_config.block_size = 32

    platforms._current_platform = Platform()
    from vllm.distributed.device_communicators import cuda_wrapper

    class Runtime:
        cudaMemcpy = staticmethod(ctypes.memmove)

    cuda_wrapper.CudaRTLibrary = Runtime
    gpu_worker: Any = import_module("vllm.v1.worker.gpu_worker")
    gpu_worker.kernel_warmup = _nothing  # imports models that need torchvision
    from vllm.model_executor.model_loader import utils

    utils.device_loading_context = lambda module, _: nullcontext(
        module
    )  # would copy all tensors to the GPU and back
