"""Reading with Spark: plans on the driver, rows in the workers, batches and streams."""
