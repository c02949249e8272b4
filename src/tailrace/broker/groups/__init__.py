"""Groups in the shell: membership verbs, sessions, grants, cron ticks, reports."""
