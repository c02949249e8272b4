"""What a partition has for its messages: frames in memory, requests that wait, delays that come due."""
