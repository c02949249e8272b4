"""Blocking wrappers: objects for threads in front of those on the event loop, and calls that wait for it.

Where a method only forwards, its wrapper is one line, and type checkers, `help` and `inspect` show the
parameters, the result and the docstring of the original:

    class Admin(BlockingWrapper[topic_admin.Admin]):
        delete_topic = blocking(topic_admin.Admin.delete_topic)

`blocking` is for coroutine functions and `on_loop` for plain ones. `making` is for those that make an object
of the loop, which is handed out in a wrapper of its own. They all reach the loop through `_cross`, so a class
that has something to check first does so there.
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


class Making(Crossing[Inner_co], Protocol[Inner_co]):
    """A wrapper whose methods make other wrappers, on the same loop."""

    _portal: Portal


def making(
    method: Callable[Concatenate[Inner, P], T], wrapper: Callable[[Portal, T], W]
) -> Callable[Concatenate[Making[Inner], P], W]:
    """The blocking form of a plain function that makes something: `wrapper` is what callers get of it."""

    @functools.wraps(method)
    def call(self: Making[Inner], /, *args: P.args, **kwargs: P.kwargs) -> W:
        async def made(inner: Inner) -> T:
            return method(inner, *args, **kwargs)

        return wrapper(self._portal, self._cross(made))

    call.__annotations__ = {**method.__annotations__, "return": wrapper}
    vars(call)["__signature__"] = inspect.signature(method).replace(return_annotation=wrapper)
    return call
