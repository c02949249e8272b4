"""Stream-stream join: orders and the payments that follow within an hour become paid orders, exactly once.

python examples/spark/stream_join.py [URL]        publishes orders and payments, and joins them

Either side may come first. Spark keeps what has found no partner until the watermarks of both sides say that
none can come any more; so both have one, and the join bounds the time between them.
"""

import json
import sys
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tailrace import sync
from tailrace.spark.json_rows import from_json_value
from tailrace.spark.sessions import session

ORDERS, PAYMENTS, PAID = "example-orders", "example-payments", "example-paid-orders"


def publish(client: sync.Client, begin: datetime, first: int, count: int) -> None:
    """Orders a minute apart; payments two minutes later, but none for every third order."""
    with client.producer(ORDERS) as orders, client.producer(PAYMENTS) as payments:
        for number in range(first, first + count):
            time = begin + timedelta(minutes=number - first)
            order = {"order": number, "cents": 100 * number}
            orders.send(json.dumps(order).encode(), key=b"%d" % number, timestamp=time)
            if number % 3:
                payment = {"order": number, "by": "card"}
                later = time + timedelta(minutes=2)
                payments.send(json.dumps(payment).encode(), key=b"%d" % number, timestamp=later)


def paid_orders(orders: DataFrame, payments: DataFrame) -> DataFrame:
    """Orders with their payments, as messages keyed by the order."""
    ordered = from_json_value(orders, "order long, cents long").select(
        F.col("data.order").alias("order"),
        F.col("data.cents").alias("cents"),
        F.col("timestamp").alias("ordered"),
    )
    paid = from_json_value(payments, "order long, by string").select(
        F.col("data.order").alias("payment_of"),
        F.col("data.by").alias("by"),
        F.col("timestamp").alias("paid"),
    )
    in_time = "order = payment_of AND paid BETWEEN ordered AND ordered + INTERVAL 1 HOUR"
    joined = ordered.withWatermark("ordered", "10 minutes").join(
        paid.withWatermark("paid", "10 minutes"), F.expr(in_time)
    )
    value = F.to_json(F.struct("order", "cents", "by", "ordered", "paid"))
    return joined.select(F.col("order").cast("string").alias("key"), value.alias("value"))


def run(spark: SparkSession, url: str, checkpoint: str) -> None:
    """Join what is there, and end. With the same checkpoint it goes on where it ended."""

    def events(topic: str) -> DataFrame:
        return spark.readStream.format("tailrace").option("url", url).option("topic", topic).load()

    query = (
        paid_orders(events(ORDERS), events(PAYMENTS))
        .writeStream.format("tailrace")
        .option("url", url)
        .option("topic", PAID)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "tailrace://127.0.0.1:7400"
    with sync.connect(url) as client:
        for topic in (ORDERS, PAYMENTS, PAID):
            client.admin().create_topic(topic, if_missing=True)
        publish(client, datetime.now(UTC) - timedelta(minutes=20), first=1, count=10)
    spark = session("paid orders")
    run(spark, url, "checkpoints/stream-join")
    results = spark.read.format("tailrace").option("url", url).option("topic", PAID).load()
    for row in results.select(F.col("value").cast("string")).collect():
        print(row["value"])
    spark.stop()


if __name__ == "__main__":
    main()
