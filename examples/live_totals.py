"""A streaming job with state: the steps of agent runs come in, the totals of each agent go out, exactly once.

The totals are Spark's state, kept in the checkpoint: stop the job and start it again, and it goes on counting. Every
micro-batch appends the totals that changed to the stream of their agent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

from millstream.client import Client
from millstream.spark.columns import typed_schema
from millstream.spark.session import spark_session

SOURCE = "agent-runs"
TARGET = "agent-totals"


# %% Steps as they are appended, from the first one on.
def start(url: str, checkpoint: Path, *, once: bool = False) -> StreamingQuery:
    spark = spark_session("live totals")
    with Client(url) as client:
        client.bucket(TARGET).create(exist_ok=True)
    schema = typed_schema("agent STRING, tokens INT", ("stream",))
    steps = (
        spark.readStream.format("millstream")
        .options(url=url, bucket=SOURCE, prefix="run-", startingOffsets="earliest", maxRecordsPerTrigger=10_000)
        .schema(schema)
        .load()
    )

    # %% The state: for each agent, how many steps and tokens so far.
    totals = steps.groupBy("agent").agg(f.count("*").alias("steps"), f.sum("tokens").alias("tokens"))

    # %% What changed goes out, one message for each agent and micro-batch. A micro-batch that is run again is written
    # under the same version and in the same partitions, so the server knows what it has of it.
    messages = totals.where("agent IS NOT NULL").select(f.col("agent").alias("stream"), "agent", "steps", "tokens")

    def write(changed: DataFrame, batch: int) -> None:
        target = changed.write.format("millstream").options(url=url, bucket=TARGET)
        target.options(txnAppId="live-totals", txnVersion=batch, txnResume=True).mode("append").save()

    sink = messages.writeStream.outputMode("update").foreachBatch(write)
    sink = sink.option("checkpointLocation", str(checkpoint))
    return (sink.trigger(availableNow=True) if once else sink.trigger(processingTime="1 second")).start()


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:4437")
    parser.add_argument("--checkpoint", type=Path, default=Path("live-totals-checkpoint"))
    parser.add_argument("--once", action="store_true", help="process what there is, then stop")
    given = parser.parse_args()
    start(given.url, given.checkpoint, once=given.once).awaitTermination()
