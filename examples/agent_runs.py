"""Agent runs become tables and a chart: every run is a stream, every step of it a message.

Runs as it stands, or cell by cell in an editor that knows `# %%`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from millstream.client import Client
from millstream.spark.columns import typed_schema
from millstream.spark.session import spark_session

BUCKET = "agent-runs"
STEP = "agent STRING, step INT, state STRING, tokens INT, seconds DOUBLE"


# %% Some runs to look at: 40 of them, by three agents, written by Spark itself.
def write_runs(spark: SparkSession, url: str) -> None:
    with Client(url) as client:
        client.bucket(BUCKET).create(exist_ok=True)
    steps = spark.range(40).select(f.col("id").alias("run"), f.explode(f.sequence(f.lit(1), 5 + f.col("id") % 7)))
    steps = steps.select(
        f.format_string("run-%03d", "run").alias("stream"),
        f.element_at(
            f.array(f.lit("planner"), f.lit("coder"), f.lit("critic")), (f.col("run") % 3 + 1).cast("int")
        ).alias("agent"),
        f.col("col").alias("step"),
        f.when(f.col("col") == 5 + f.col("run") % 7, "done").otherwise("working").alias("state"),
        ((f.hash("run", "col") % 400) + 600).alias("tokens"),
        (f.abs(f.hash("col", "run")) % 90 / 10).alias("seconds"),
    )
    # The same version is written once, however often this cell runs.
    sink = steps.write.format("millstream").options(url=url, bucket=BUCKET, orderBy="step")
    sink.options(txnAppId="agent-runs-example", txnVersion=1).mode("append").save()


# %% The steps, with the fields of their JSON as columns.
def read_steps(spark: SparkSession, url: str) -> DataFrame:
    schema = typed_schema(STEP, ("stream", "offset_start", "appended_at"))
    return spark.read.format("millstream").options(url=url, bucket=BUCKET, prefix="run-").schema(schema).load()


# %% One row a run.
def run_table(steps: DataFrame) -> DataFrame:
    return steps.groupBy("stream", "agent").agg(
        f.count("*").alias("steps"),
        f.sum("tokens").alias("tokens"),
        f.round(f.sum("seconds"), 1).alias("seconds"),
        f.max_by("state", "offset_start").alias("state"),
    )


# %% Tokens by agent, as a chart.
def draw(runs: DataFrame, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    totals = runs.groupBy("agent").agg(f.sum("tokens").alias("tokens")).orderBy("agent").collect()
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.bar([row.agent for row in totals], [row.tokens for row in totals], color="#3b6ea5")
    axes.set_ylabel("tokens")
    axes.set_title("Tokens by agent")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(url: str, folder: Path) -> DataFrame:
    spark = spark_session("agent runs")
    write_runs(spark, url)
    runs = run_table(read_steps(spark, url)).persist()
    runs.orderBy("stream").show(5)
    runs.coalesce(1).write.mode("overwrite").parquet(str(folder / "runs"))
    draw(runs, folder / "tokens-by-agent.png")
    return runs


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:4437")
    parser.add_argument("--folder", type=Path, default=Path("agent-runs"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    main(given.url, given.folder)
    print(f"the table and the chart are in {given.folder}")
