"""Dedupe: events that a careless producer sent several times, each once, by an id within the event.

python examples/spark/dedupe.py [URL]             publishes some clicks twice, and keeps one of each

Ids are remembered for as long as the watermark says: a copy that comes more than ten minutes after the first,
by the timestamps of the messages, is taken for a new one. Producers that use `dedup_id` need none of this.
"""

import json
import sys
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tailrace import sync
from tailrace.spark.json_rows import from_json_value
from tailrace.spark.sessions import session

CLICKS, ONCE = "example-clicks", "example-clicks-once"


def publish(client: sync.Client, begin: datetime, first: int, count: int) -> None:
    """Clicks a second apart; every other one comes twice, the second time half a minute later."""
    with client.producer(CLICKS) as producer:
        for number in range(first, first + count):
            click = json.dumps({"click": number, "page": f"/{number % 3}"}).encode()
            time = begin + timedelta(seconds=number - first)
            producer.send(click, timestamp=time)
            if number % 2:
                producer.send(click, timestamp=time + timedelta(seconds=30))


def once(clicks: DataFrame) -> DataFrame:
    """Each click once, as it came."""
    decoded = from_json_value(clicks, "click long").withColumn("click", F.col("data.click"))
    unique = decoded.withWatermark("timestamp", "10 minutes").dropDuplicatesWithinWatermark(["click"])
    return unique.select("key", "value", "timestamp", "headers")


def run(spark: SparkSession, url: str, checkpoint: str) -> None:
    """Dedupe what is there, and end. With the same checkpoint it goes on where it ended."""
    clicks = spark.readStream.format("tailrace").option("url", url).option("topic", CLICKS).load()
    query = (
        once(clicks)
        .writeStream.format("tailrace")
        .option("url", url)
        .option("topic", ONCE)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "tailrace://127.0.0.1:7400"
    with sync.connect(url) as client:
        for topic in (CLICKS, ONCE):
            client.admin().create_topic(topic, if_missing=True)
        publish(client, datetime.now(UTC) - timedelta(minutes=1), first=0, count=10)
    spark = session("dedupe")
    run(spark, url, "checkpoints/dedupe")
    for topic in (CLICKS, ONCE):
        messages = spark.read.format("tailrace").option("url", url).option("topic", topic).load()
        print(f"{topic}: {messages.count()} messages")
    spark.stop()


if __name__ == "__main__":
    main()
