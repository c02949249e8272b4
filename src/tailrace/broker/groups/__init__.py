"""Groups at work: membership verbs, sessions, grants, cron ticks, reports."""
