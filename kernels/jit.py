"""Triton where it is installed, elsewhere a stand-in with which kernels can be declared; and their launch.

What a launch costs in Python matters: a layer has half a dozen, and the GPU waits where they take longer than its work.
Triton's own way sorts out arguments, constants and options anew each time. `launch` looks up what that led to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-untyped]

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., Any]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

        def __getattr__(self, name: str) -> Any: ...

    class Triton:
        """What is used of a module that has no types."""

        @overload
        def jit(self, function: Callable[..., Any]) -> Kernel: ...

        @overload
        def jit(self, **options: Any) -> Callable[[Callable[..., Any]], Kernel]: ...

        def jit(self, function: Any = None, **options: Any) -> Any: ...

        def __getattr__(self, name: str) -> Any: ...

    triton: Triton
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # torch for CPUs comes without it

        class triton:
            @staticmethod
            def jit(function: Any = None, **options: Any) -> Any:
                return triton.jit if function is None else function

        tl = None

__all__ = ["launch", "power_of_2", "tl", "triton"]

_Key = tuple[object, ...]
_KNOWN_VERSIONS = [(3, 6), (3, 7), (3, 8), (3, 9)]  # that take the arguments which `launch` gives to `run`


class _Launches:
    """What Triton compiled of one kernel, by all that it depends on."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel  # kept, so that no other one gets its id
        parameters = inspect.signature(kernel.fn).parameters.values()
        is_constant = ["constexpr" in str(parameter.annotation) for parameter in parameters]
        self.constants = tuple(p.name for p, is_one in zip(parameters, is_constant, strict=True) if is_one)
        name = kernel.fn.__qualname__
        assert is_constant == sorted(is_constant), f"{name}: tl.constexpr parameters must come last, for launch()"
        # Not in the interpreter; nor on AMD, where kernels depend on the sizes of tensors too.
        self.remembers = isinstance(kernel, triton.JITFunction) and torch.version.hip is None and _is_known_version()
        self.found: dict[_Key, Any] = {}
        self.stream_of: Any = None  # from a device's index to its current stream, once something is found

    def launch_first(
        self,
        key: _Key | None,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        """The ordinary way; what it compiled is remembered, unless the key is None."""
        assert tuple(constants) == self.constants, (
            f"{self.kernel.fn.__qualname__}: constants {list(constants)}, its signature has {list(self.constants)}"
        )
        compiled = self.kernel[grid](*args, **constants, **options)
        if key is not None and hasattr(compiled, "packed_metadata"):
            self.stream_of = triton.runtime.driver.active.get_current_stream
            self.found[key] = compiled


_launches: dict[int, _Launches] = {}  # by id: Triton's hash of a kernel takes a lock


def launch(
    kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], **options: Any
) -> None:
    """kernel[grid](*args, **constants, **options), several times faster from the second time on.

    Args:
        args: run-time arguments in the kernel's order; the first is a tensor, on the current device.
        constants: all tl.constexpr parameters, which come last in the signature, in its order.
        options: num_warps, num_stages, …
    """
    launches = _launches.get(id(kernel))
    if launches is None:
        launches = _launches[id(kernel)] = _Launches(kernel)
    key = _key(args, constants, options) if launches.remembers else None
    compiled = None if key is None else launches.found.get(key)
    if compiled is None:
        launches.launch_first(key, grid, args, constants, options)
        return
    # What `compiled[grid](…)` does, less the hooks of Triton's profiler, which take time even where there are none.
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    stream = launches.stream_of(args[0].get_device())
    function, metadata = compiled.function, compiled.packed_metadata
    compiled.run(x, y, z, stream, function, metadata, None, None, None, *args, *constants.values())


def _is_known_version() -> bool:
    return tuple(map(int, triton.__version__.split(".")[:2])) in _KNOWN_VERSIONS


def _key(args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]) -> _Key | None:
    """Launches of a kernel that differ in what Triton compiles have different keys. None: no key tells.

    An argument gives None, the type float, True or False for integers by whether 16 divides them, a string for 1 and
    integers beyond 32 bits, or two entries for tensors, of which the first is their type. Constants that are equal are
    one for Triton too, be they 1 or True.
    """
    key: list[object] = [args[0].get_device()]
    for arg in args:
        kind = type(arg)
        if kind is int:
            key.append(arg & 15 == 0 if 1 < arg < 2147483648 else _int_class(arg))
        elif kind is float:
            key.append(float)
        elif arg is None:
            key.append(None)
        elif isinstance(arg, Tensor):
            key.append(arg.dtype)
            key.append(arg.data_ptr() & 15 == 0)
        else:
            return None
    return (*key, *constants.values(), *options, *options.values())


def _int_class(n: int) -> str | bool:
    if n == 1:
        return "1"
    if -(2**31) <= n < 2**31:
        return n % 16 == 0
    bits = "int64" if -(2**63) <= n < 2**63 else "uint64"
    return f"{bits} {n % 16 == 0}"


def power_of_2(least: int) -> int:
    """The first one that is not smaller, as `triton.next_power_of_2`, which takes microseconds."""
    return 1 << (least - 1).bit_length()
