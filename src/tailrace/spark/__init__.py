"""The data pipeline on Spark: a data source for PySpark, and pipelines that run on it (extra `spark`)."""
