"""The SDK: batching, retries and reconnects in front of the broker's verbs, over a socket or inside the
process.
"""
