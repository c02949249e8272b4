"""The coordinator of groups: members, assignment, generations, schedules, deletions."""
