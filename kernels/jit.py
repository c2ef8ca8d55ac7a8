"""Triton where it is installed. Elsewhere a stand-in with which kernels can be declared, though not launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

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

__all__ = ["tl", "triton"]
