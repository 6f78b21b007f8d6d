"""Dispatch modes that note the called ops, or fail where a host would wait for its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CalledOps(TorchDispatchMode):
    """Note the names of the called ops of a namespace, in order."""

    def __init__(self, namespace: str = "fastmp") -> None:
        super().__init__()
        self.namespace, self.names = namespace, list[str]()

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func.namespace == self.namespace:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class NoDeviceWaits(TorchDispatchMode):
    """Fail at copies to another device and at reads of a value, which make a GPU's host wait."""

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            device = (kwargs or {}).get("device")
            assert device is None or torch.device(device) == args[0].device, "a copy to another device"
        reads = func is torch.ops.aten._local_scalar_dense.default and args[0].device.type != "cpu"
        assert not reads, "the value of a tensor on the device is read"
        return func(*args, **(kwargs or {}))
