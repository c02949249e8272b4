"""Quality check: rows that break a rule go to a topic of dead letters with the reason, the others pass.

python examples/spark/quality_check.py [URL]      checks a few readings, and prints a report as JSON

One query writes to both topics: each row names its own in the column `topic`, and all rows of a micro-batch
become messages together, exactly once. A row that is not even JSON breaks the rule `decodable`.
"""

import json
import sys

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from tailrace import sync
from tailrace.spark.json_rows import from_json_value
from tailrace.spark.sessions import session

READINGS, CLEAN, REJECTED = "example-readings", "example-readings-clean", "example-readings-rejected"
SCHEMA = "sensor string, celsius double"
RULES = {
    "decodable": "data IS NOT NULL",
    "has a sensor": "data.sensor IS NOT NULL",
    "is possible": "data.celsius BETWEEN -90 AND 60",
}
"""Rules by name; the first that is not true rejects a row."""


def publish(client: sync.Client) -> None:
    """Three good readings, and one for each rule that breaks it."""
    good = [{"sensor": f"s{number}", "celsius": 20.5 + number} for number in range(3)]
    bad = [{"celsius": 1.0}, {"sensor": "s9", "celsius": 451.0}]
    with client.producer(READINGS) as producer:
        for reading in [*good, *bad]:
            producer.send(json.dumps(reading).encode())
        producer.send(b"{ not JSON")


def checked(readings: DataFrame) -> DataFrame:
    """The same messages, each for the topic where it belongs, with the broken rule as a header."""
    broken: Column = F.lit(None).cast("string")
    for name, rule in reversed(RULES.items()):
        broken = F.when(F.expr(rule), broken).otherwise(F.lit(name))
    place = F.concat_ws("/", "topic", "partition", "offset")
    headers = F.when(
        F.col("broken").isNotNull(), F.create_map(F.lit("rule"), "broken", F.lit("origin"), place)
    )
    rows = from_json_value(readings, SCHEMA, mode="null").withColumn("broken", broken)
    target = F.when(F.col("broken").isNull(), F.lit(CLEAN)).otherwise(F.lit(REJECTED))
    return rows.select("key", "value", "timestamp", headers.alias("headers"), target.alias("topic"))


def run(spark: SparkSession, url: str, checkpoint: str) -> None:
    """Check what is there, and end. With the same checkpoint it goes on where it ended."""
    readings = spark.readStream.format("tailrace").option("url", url).option("topic", READINGS).load()
    query = (
        checked(readings)
        .writeStream.format("tailrace")
        .option("url", url)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def report(spark: SparkSession, url: str) -> dict[str, object]:
    """How many rows passed, and how many broke which rule."""

    def messages(topic: str) -> DataFrame:
        return spark.read.format("tailrace").option("url", url).option("topic", topic).load()

    rule = F.element_at("headers", "rule").cast("string").alias("rule")
    counts = messages(REJECTED).groupBy(rule).count().collect()
    rules = {row["rule"]: row["count"] for row in counts}
    return {"passed": messages(CLEAN).count(), "rejected": {name: rules.get(name, 0) for name in RULES}}


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "tailrace://127.0.0.1:7400"
    with sync.connect(url) as client:
        for topic in (READINGS, CLEAN, REJECTED):
            client.admin().create_topic(topic, if_missing=True)
        publish(client)
    spark = session("quality check")
    run(spark, url, "checkpoints/quality-check")
    print(json.dumps(report(spark, url)))
    spark.stop()


if __name__ == "__main__":
    main()
