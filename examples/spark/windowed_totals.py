"""Windowed aggregation: what each shop sold in each minute, as a topic that has every total exactly once.

python examples/spark/windowed_totals.py [URL]    publishes a few sales, and totals the minutes that are over

A minute is over when a sale was seen that is more than a minute younger: that is what the watermark says.
Sales which come later than that are left out; a longer watermark waits longer and keeps more state.
"""

import json
import sys
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tailrace import sync
from tailrace.spark.json_rows import from_json_value
from tailrace.spark.sessions import session

SALES, TOTALS = "example-sales", "example-sales-per-minute"


def publish(client: sync.Client, begin: datetime, minutes: int) -> None:
    """A sale in each of two shops every ten seconds."""
    with client.producer(SALES) as producer:
        for number in range(6 * minutes):
            for shop, cents in (("north", 100), ("south", 250)):
                sale = json.dumps({"shop": shop, "cents": cents}).encode()
                producer.send(sale, key=shop.encode(), timestamp=begin + timedelta(seconds=10 * number))


def totals(sales: DataFrame) -> DataFrame:
    """The total of each shop and minute, as messages keyed by the shop."""
    decoded = from_json_value(sales, "shop string, cents long")
    return (
        decoded.withWatermark("timestamp", "1 minute")
        .groupBy(F.window("timestamp", "1 minute"), F.col("data.shop").alias("shop"))
        .agg(F.count("*").alias("sales"), F.sum("data.cents").alias("cents"))
        .select(
            F.col("shop").alias("key"),
            F.to_json(F.struct(F.col("window.start").alias("minute"), "shop", "sales", "cents")).alias(
                "value"
            ),
        )
    )


def run(spark: SparkSession, url: str, checkpoint: str) -> None:
    """Total what is there, and end. With the same checkpoint it goes on where it ended."""
    sales = spark.readStream.format("tailrace").option("url", url).option("topic", SALES).load()
    query = (
        totals(sales)
        .writeStream.format("tailrace")
        .option("url", url)
        .option("topic", TOTALS)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "tailrace://127.0.0.1:7400"
    with sync.connect(url) as client:
        for topic in (SALES, TOTALS):
            client.admin().create_topic(topic, if_missing=True)
        publish(client, datetime.now(UTC) - timedelta(minutes=5), minutes=5)
    spark = session("windowed totals")
    run(spark, url, "checkpoints/windowed-totals")
    results = spark.read.format("tailrace").option("url", url).option("topic", TOTALS).load()
    for row in results.select(F.col("value").cast("string")).collect():
        print(row["value"])
    spark.stop()


if __name__ == "__main__":
    main()
