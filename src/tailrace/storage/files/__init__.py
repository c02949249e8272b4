"""Logs in segment files: appended, synced, opened after a crash, searched, scrubbed, repaired."""
