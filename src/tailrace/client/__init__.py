"""The SDK: batching, retries and reconnects in front of the broker's verbs, near or far."""
