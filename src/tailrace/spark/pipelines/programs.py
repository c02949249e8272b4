"""The user's part of a projection: a function on DataFrames, or a query over views."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Program:
    """What makes rows of events. In mode `replace` it is given the previous table, too."""

    def __init__(self, session: SparkSession, function: str, sql: str, mode: str) -> None:
        self._session = session
        self._with_previous = mode == "replace"
        self._function = None if sql else load_function(function, 2 if self._with_previous else 1)
        self.text = _query(sql) if sql else function
        """What it is called: its SQL, or the name of its function."""

    def __call__(self, events: DataFrame, previous: DataFrame | None) -> DataFrame:
        """The rows; nothing runs yet."""
        if self._function is not None:
            result = self._function(events, previous) if self._with_previous else self._function(events)
            if not hasattr(result, "sparkSession"):
                raise InvalidRequest(f"function: {self.text} gave {type(result).__name__}, not a DataFrame")
            return result  # type: ignore[no-any-return]
        events.createOrReplaceTempView("events")
        if previous is not None:
            previous.createOrReplaceTempView("previous")
        else:
            # Another projection may have left one in this session.
            self._session.catalog.dropTempView("previous")
        return self._session.sql(self.text)


def _query(sql: str) -> str:
    if not sql.startswith("@"):
        return sql
    try:
        return Path(sql[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"sql: {sql[1:]}: {error.strerror}") from None


def load_function(target: str, parameters: int) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION names, for so many DataFrames; it may be in the caller's folder."""
    from pyspark import cloudpickle

    module_name, colon, name = target.partition(":")
    if not module_name or not colon or not name:
        raise InvalidRequest(f"function: {target!r}: write it as MODULE:FUNCTION, as in shop.views:balances")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # Something that the program itself needs is missing: its traceback says what.
        raise InvalidRequest(f"function: {module_name!r}: there is no such module here") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidRequest(f"function: {module_name} has no function {name!r}")
    try:
        inspect.signature(function).bind(*range(parameters))
    except TypeError:
        wants = "the events" if parameters == 1 else "the events and the previous table"
        raise InvalidRequest(f"function: {target} has to take {parameters}: {wants}") from None
    # Workers do not search the folder of the caller, so functions of the module travel by value.
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return function  # type: ignore[no-any-return]
