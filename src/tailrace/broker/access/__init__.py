"""Who a caller is and what it may do, at work."""
