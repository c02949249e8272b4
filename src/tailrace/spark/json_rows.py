"""Values that are JSON, decoded by a schema; rows that cannot be decoded are named, nulled or set apart."""

from __future__ import annotations

from typing import Literal, overload

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructType

from tailrace.errors import InvalidRequest

MODES = ("fail", "null", "dead_letter")
_RAW = "_tailrace_undecoded"
_DECODED = "_tailrace_decoded"


@overload
def from_json_value(
    df: DataFrame, schema: StructType | str, mode: Literal["fail", "null"] = "fail", column: str = "data"
) -> DataFrame: ...


@overload
def from_json_value(
    df: DataFrame, schema: StructType | str, mode: Literal["dead_letter"], column: str = "data"
) -> tuple[DataFrame, DataFrame]: ...


def from_json_value(
    df: DataFrame, schema: StructType | str, mode: str = "fail", column: str = "data"
) -> DataFrame | tuple[DataFrame, DataFrame]:
    """The rows with their values decoded into a struct of that schema (a StructType or DDL), as one more
    column. Fields that a value lacks are null, those that the schema lacks are ignored; a value that is null
    is decoded as null.

    A value that is no JSON object of that schema is an error that names topic, partition and offset as far as
    the rows have them (`fail`), a null (`null`), or its row goes to a second DataFrame: `dead_letter` gives
    (decoded, undecodable), the latter with the columns of `df` and a column `error`.
    """
    if mode not in MODES:
        raise InvalidRequest(f"mode: one of {', '.join(MODES)}, not {mode!r}")
    if "value" not in df.columns:
        raise InvalidRequest(f"value: the rows have no such column, only {', '.join(df.columns)}")
    if column in df.columns:
        raise InvalidRequest(f"column: the rows have a column {column} already; choose another name")
    fields = _fields(schema)
    if _RAW in fields.fieldNames():
        raise InvalidRequest(f"schema: {_RAW} is a name of Tailrace's own")
    # A struct with the raw text beside the fields: Spark fills it exactly where the rest does not fit.
    wide = StructType([*fields.fields]).add(_RAW, StringType())
    parsed = F.from_json(
        F.col("value").cast("string"), wide, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _RAW}
    )
    rows = df.withColumn(_DECODED, parsed)
    bad = _undecodable()
    names = [F.col(f"{_DECODED}.`{name}`").alias(name) for name in fields.fieldNames()]
    good = F.when(F.col("value").isNotNull() & ~bad, F.struct(*names))
    if mode == "fail":
        complaint = F.raise_error(_place(df)).cast(fields)
        return rows.withColumn(column, F.when(bad, complaint).otherwise(good)).drop(_DECODED)
    if mode == "null":
        return rows.withColumn(column, good).drop(_DECODED)
    decoded = rows.where(~bad).withColumn(column, good).drop(_DECODED)
    return decoded, rows.where(bad).withColumn("error", _place(df)).drop(_DECODED)


def _fields(schema: StructType | str) -> StructType:
    given = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(given, StructType) or not given.fields:
        raise InvalidRequest(f"schema: fields with their types, not {schema!r}")
    # What is not there is null, whatever the schema hopes for: Spark would invent values otherwise.
    return StructType([type(f)(f.name, f.dataType, True, f.metadata) for f in given.fields])


def _undecodable() -> Column:
    """True or false, never null: a value that is there and was not understood as a whole."""
    whole = F.col(_DECODED).isNotNull() & F.col(f"{_DECODED}.{_RAW}").isNull()
    text = F.is_valid_utf8(F.col("value").cast("string"))
    return F.col("value").isNotNull() & ~(whole & text)


def _place(df: DataFrame) -> Column:
    known = [name for name in ("topic", "partition", "offset") if name in df.columns]
    parts: list[Column] = [F.lit("value: not a JSON object of the schema")]
    for name in known:
        parts += [F.lit(f", {name} "), F.coalesce(F.col(name).cast("string"), F.lit("null"))]
    return F.concat(*parts)
