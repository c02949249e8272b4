"""Pipelines by name: each a module of this package, imported when it is asked for, all called the same way.

A pipeline is a module named like the pipeline, with

- `NAME` and `HELP`: one line that says what it does,
- `OPTIONS`: a frozen struct below `CommonOptions`; every field has its meaning in `msgspec.Meta`,
- `run(session, options, progress) -> Summary`: any struct. Its plain fields are printed as names and values,
  a field with a list of structs as a table.

Importing one needs no Spark: `pyspark` is imported inside `run`. State lies beside the output, so that a
pipeline that was killed anywhere goes on when it is run again, and running it twice changes nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast, get_origin

import msgspec
from msgspec import Meta

from tailrace.errors import InvalidRequest, NotFound
from tailrace.spark.pipelines.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = ("archive", "backfill", "compact", "project", "traces")
GIVEN_BY_FLAGS = ("topic", "url", "follow")


class CommonOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every pipeline is told; pipelines add their own fields below."""

    topic: Annotated[str, Meta(description="the topic that it is about")]
    url: Annotated[str | None, Meta(description="the broker; None for TAILRACE_URL or the default")] = None
    follow: Annotated[bool, Meta(description="go on with what comes, until stopped")] = False


class Pipeline(Protocol):
    """What a module of this package has."""

    NAME: str
    HELP: str
    OPTIONS: type[CommonOptions]

    def run(self, session: SparkSession, options: Any, progress: Progress) -> msgspec.Struct:
        """Do the work; in the end, or when it was stopped, say what was done."""


class OptionLine(msgspec.Struct, frozen=True):
    """One option of a pipeline, for people."""

    name: str
    default: str | None
    """As a command line would write it; None where the option has to be given."""
    meaning: str


def pipeline(name: str) -> Pipeline:
    """The pipeline of a name."""
    if name not in NAMES:
        raise NotFound(
            f"there is no pipeline {name!r}: {', '.join(NAMES)}", hint="`tailrace pipeline list` lists them"
        )
    return cast("Pipeline", importlib.import_module(f"{__name__}.{name}"))


def options_of(found: Pipeline) -> list[OptionLine]:
    """The options of a pipeline that `--option` sets."""
    lines = []
    for field in msgspec.inspect.type_info(found.OPTIONS).fields:  # type: ignore[attr-defined]
        if field.name in GIVEN_BY_FLAGS:
            continue
        made = field.default is msgspec.NODEFAULT and not field.required
        default = None if field.required else _written(field.default_factory() if made else field.default)
        meaning = (getattr(field.type, "extra_json_schema", None) or {}).get("description", "")
        lines.append(OptionLine(field.name, default, meaning))
    return lines


def parse_options(found: Pipeline, texts: Mapping[str, str], **flags: Any) -> CommonOptions:
    """Options out of the texts of a command line; the error names the option."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(found.OPTIONS)}
    values: dict[str, Any] = dict(flags)
    for name, text in texts.items():
        field = name.replace("-", "_")
        if field not in kinds or field in GIVEN_BY_FLAGS:
            known = ", ".join(line.name for line in options_of(found)) or "none"
            raise InvalidRequest(f"--option {name}: {found.NAME} has no such option; it has: {known}")
        values[field] = text.split(",") if _is_list(kinds[field]) else text
    missing = [line.name for line in options_of(found) if line.default is None and line.name not in values]
    if missing:
        raise InvalidRequest(f"{found.NAME} needs --option {missing[0]}=...")
    try:
        return msgspec.convert(values, found.OPTIONS, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"options of {found.NAME}: {error}") from None


def _written(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list | tuple):
        return ",".join(map(str, default))
    return "" if default is None else str(default)


def _is_list(kind: Any) -> bool:
    """Whether a field holds several values, which a command line separates by commas."""
    if get_origin(kind) is Annotated:
        kind = kind.__origin__
    return (get_origin(kind) or kind) in (list, tuple)
