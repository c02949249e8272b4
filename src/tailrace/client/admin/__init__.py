"""Administration: topics, groups, dead letters, schedules, traces."""
