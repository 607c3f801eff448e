"""Second device for tests on a CPU: its tensors do not mix with those of the CPU.

    with SecondDevice() as device:
        x = torch.ones(3).to(NAME)
        x + torch.ones(3)  # DeviceError, as on a GPU
        device.syncs       # places where the host waited for the device
        device.uploads     # places that copied a tensor to it

The tensors claim the device `meta` and hold their values in CPU memory, so that programs compute
what they compute on a CPU. As on CUDA, operations may mix both devices only to copy, with scalars,
and for indices; those that return values to the host are counted.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import rlctl

NAME = "meta"
_PACKAGE = str(Path(rlctl.__file__).parent) + os.sep
_COPIES = {"_to_copy", "copy_"}
_TAKE_INDICES = {"index", "index_put_", "_index_put_impl_", "_unsafe_index"}
_SIZES_FROM_VALUES = {"nonzero", "_unique2", "unique_consecutive", "masked_select", "bincount"}


class DeviceError(RuntimeError):
    """An operation had tensors of both devices."""


class SecondTensor(Tensor):
    """Tensor of the second device, with its values in `held` on the CPU."""

    _held: Tensor
    arriving: Future[list[Tensor]] | None  # values that replace it before it is used next

    @staticmethod
    def __new__(cls, held: Tensor) -> SecondTensor:
        self = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=NAME,
        )
        self._held, self.arriving = held, None
        return self

    @property
    def held(self) -> Tensor:
        """The values, once they have arrived."""
        if self.arriving is not None:
            (values,) = self.arriving.result(timeout=600)
            self._held.copy_(values)
            self.arriving = None
        return self._held

    def __repr__(self, **_: Any) -> str:
        return f"SecondTensor({self.held!r})"

    def tolist(self) -> Any:
        """Copy to the host first, as CUDA does."""
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        """Refuse, as CUDA does."""
        raise DeviceError("numpy of a tensor of the second device")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise DeviceError(f"{func} outside of SecondDevice")


class _Constants(TorchFunctionMode):
    """Makes `torch.tensor` copy its values to the second device, which else gets none.

    The device `alias` is the second device, too.
    """

    def __init__(self, alias: str) -> None:
        super().__init__()
        self.alias = alias

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device == self.alias:
            device = kwargs["device"] = NAME
        if func is torch.tensor and device is not None and torch.device(device).type == NAME:
            return func(*args, **kwargs | {"device": "cpu"}).to(NAME)
        return func(*args, **kwargs)


class SecondDevice(TorchDispatchMode):
    """Runs operations of both devices, refuses mixed ones, and counts waits of the host."""

    def __init__(self, alias: str = NAME) -> None:
        super().__init__()
        self.syncs: Counter[str] = Counter()  # by operation and line
        self.uploads: Counter[str] = Counter()  # likewise: copies of tensors to this device
        self._constants = _Constants(alias)

    def __enter__(self) -> Self:
        self._constants.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._constants.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        leaves, _ = tree_flatten((args, kwargs))
        second = [each for each in leaves if isinstance(each, SecondTensor)]
        first = [
            each
            for each in leaves
            if isinstance(each, Tensor) and not isinstance(each, SecondTensor)
        ]
        self._check(name, second, first)
        asked = kwargs.get("device")
        to_second = (
            torch.device(asked).type == NAME
            if asked is not None
            else isinstance(args[0], SecondTensor)
            if name in _COPIES
            else bool(second)
        )
        if "device" in kwargs and asked is not None:
            kwargs["device"] = torch.device("cpu")
        self._count(name, args, second, to_second)
        owners = {id(each.held): each for each in second}
        bare_args, bare_kwargs = tree_map(_bare, (args, kwargs))
        result = func(*bare_args, **bare_kwargs)
        if name == "_to_copy" and to_second != bool(second) and result is bare_args[0]:
            result = result.clone()

        def wrap(value: Any) -> Any:
            if isinstance(value, Tensor) and id(value) in owners:
                return owners[id(value)]
            return SecondTensor(value) if to_second and isinstance(value, Tensor) else value

        return tree_map(wrap, result)

    def _check(self, name: str, second: list[SecondTensor], first: list[Tensor]) -> None:
        """Refuse tensors of both devices, except where CUDA accepts them."""
        mixed = second and any(each.dim() for each in first)
        if mixed and name not in _COPIES | _TAKE_INDICES:
            shapes = [tuple(each.shape) for each in (*second, *first)]
            raise DeviceError(f"{name} has tensors of both devices: {shapes}")

    def _count(self, name: str, args: Any, second: list[SecondTensor], to_second: bool) -> None:
        """Count an operation that waits for values of the second device, or copies some to it."""
        fetches = name in _COPIES and second and not to_second
        masks = name in _TAKE_INDICES and any(
            isinstance(each, SecondTensor) and each.dtype == torch.bool
            for each in tree_flatten(args[1:])[0]
        )
        waits = fetches or masks or name in {"_local_scalar_dense", *_SIZES_FROM_VALUES}
        if second and waits:
            self.syncs[f"{name} {_line()}"] += 1
        elif name in _COPIES and to_second:
            source = args[1] if name == "copy_" else args[0]
            if not isinstance(source, SecondTensor):
                self.uploads[f"{name} {_line()}"] += 1


def _line() -> str:
    """Return the line of rlctl that is running, or nothing."""
    lines = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if frame.filename.startswith(_PACKAGE)
    ]
    return lines[-1] if lines else ""


def _bare(value: Any) -> Any:
    return value.held if isinstance(value, SecondTensor) else value
