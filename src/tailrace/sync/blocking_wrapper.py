"""Blocking wrappers: objects for threads in front of those on the event loop, and calls that wait for it.

Where a method only forwards, its wrapper is one line, and type checkers, `help` and `inspect` show the
parameters, the result and the docstring of the original:

    class Admin(BlockingWrapper[topic_admin.Admin]):
        delete_topic = blocking(topic_admin.Admin.delete_topic)

`blocking` is for coroutine functions and `on_loop` for plain ones. `wrapped` is put around either where the
result is itself an object of the loop, to be handed out in a wrapper of its own. They all reach the loop
through `_cross`, so a class that has something to check or to wait for first does so there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from tailrace.sync.portal import Portal

Inner = TypeVar("Inner")
Inner_co = TypeVar("Inner_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")


class Crossing(Protocol[Inner_co]):
    """What a forwarding method needs of the object that it is called on."""

    def _cross(self, start: Callable[[Inner_co], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of the inner object on the loop and wait for its end."""
        ...


class BlockingWrapper(Generic[Inner]):
    """An object of the event loop, for threads."""

    def __init__(self, portal: Portal, inner: Inner) -> None:
        self._portal = portal
        self._inner = inner

    def _cross(self, start: Callable[[Inner], Coroutine[Any, Any, T]]) -> T:
        return self._portal.call(lambda: start(self._inner))


class Enterable(Protocol):
    """An async context manager."""

    async def __aenter__(self) -> Any:
        """Open."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        ...


E = TypeVar("E", bound=Enterable)


class BlockingContext(BlockingWrapper[E]):
    """An async context manager of the event loop, for `with`."""

    def __enter__(self) -> Self:
        self._portal.call(self._inner.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(lambda: self._inner.__aexit__(kind, error, trace))


def blocking(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Crossing[Inner], P], T]:
    """The blocking form of a coroutine function."""

    @functools.wraps(method)
    def call(self: Crossing[Inner], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._cross(lambda inner: method(inner, *args, **kwargs))

    return call


def on_loop(method: Callable[Concatenate[Inner, P], T]) -> Callable[Concatenate[Crossing[Inner], P], T]:
    """The form of a plain function for other threads: the loop calls it, the caller waits."""

    @functools.wraps(method)
    def call(self: Crossing[Inner], /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def called(inner: Inner) -> T:
            return method(inner, *args, **kwargs)

        return self._cross(called)

    return call


class Wrapping(Crossing[Inner_co], Protocol[Inner_co]):
    """What a method needs besides when it hands out another wrapper."""

    _portal: Portal


def wrapped(
    forward: Callable[Concatenate[Crossing[Inner], P], T], wrapper: Callable[[Portal, T], W]
) -> Callable[Concatenate[Wrapping[Inner], P], W]:
    """A forwarding method whose result is an object of the loop: callers get it in a wrapper."""

    @functools.wraps(forward)
    def call(self: Wrapping[Inner], /, *args: P.args, **kwargs: P.kwargs) -> W:
        return wrapper(self._portal, forward(self, *args, **kwargs))

    call.__annotations__ = {**forward.__annotations__, "return": wrapper}
    vars(call)["__signature__"] = inspect.signature(forward).replace(return_annotation=wrapper)
    return call
