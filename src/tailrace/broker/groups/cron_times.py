"""Times of cron ticks: found on the wall clock of the schedule's zone, then converted to UTC.

When summer time begins, the wall clock leaves times out; when it ends, the clock shows some times twice. One
rule for all expressions:

    left out      one tick at the first moment after the gap, however many were left out;
                  none if the hour field allows every hour, because the next hour has its own ticks
    shown twice   one tick, at the first of the two moments;
                  at both if the hour field begins with `*`

For example, Berlin, where 02:00 to 03:00 is left out in March and shown twice in October:

    cron          March            October
    30 2 * * *    03:00            02:30, the first one
    30 * * * *    01:30, 03:30     01:30, 02:30, 02:30, 03:30
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from cronsim import CronSim

from tailrace.core.model.group_commands import PutSchedule

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = 1_000_000
_LOOK_BACK_US = 120 * _SECOND


def zone_of(name: str) -> tzinfo:
    """The time zone of that name; raises what `ZoneInfo` raises."""
    return UTC if name == "UTC" else ZoneInfo(name)  # UTC needs no time zone data on the machine.


def next_tick_us(put: PutSchedule, after_us: int) -> int | None:
    """The first tick after a time; None when there is none (30 February)."""
    zone = zone_of(put.zone)
    after = _EPOCH + timedelta(microseconds=after_us)
    local = after.astimezone(zone)
    # A time that the clock shows twice: look for ticks in both passes, the earlier one counts.
    passes = (0, 1) if _offset(local, 0) != _offset(local, 1) else (0,)
    found = [_first(put.cron, zone, after, fold) for fold in passes]
    ticks = [tick for tick in found if tick is not None]
    return (min(ticks) - _EPOCH) // timedelta(microseconds=1) if ticks else None


def latest_tick_us(put: PutSchedule, after_us: int, now_us: int) -> int | None:
    """The last tick in (after, now]; None when there is none. The search begins near `now` and goes back in
    growing steps, so that years of downtime cost no more than a few ticks."""
    back_us = _LOOK_BACK_US
    while True:
        from_us = max(after_us, now_us - back_us)
        tick_us, found_us = next_tick_us(put, from_us), None
        while tick_us is not None and tick_us <= now_us:
            found_us, tick_us = tick_us, next_tick_us(put, tick_us)
        if found_us is not None or from_us == after_us:
            return found_us
        back_us *= 8


def _first(cron: str, zone: tzinfo, after: datetime, fold: int) -> datetime | None:
    """The first tick after a moment; times that come twice are taken in the pass `fold`."""
    local = after.astimezone(zone)
    # Start from the local time of the later pass; ticks before `after` are skipped below.
    start = (after + min(_offset(local, 0), _offset(local, 1))).replace(tzinfo=None)
    ticks = CronSim(cron, start)
    every_hour = len(ticks.hours) == 24
    if fold and not every_hour and not ticks.parts[2].startswith("*"):
        return None
    for tick in ticks:
        moment = _moment(tick.replace(tzinfo=zone), fold)
        left_out = moment.astimezone(zone).replace(tzinfo=None) != tick
        if moment > after and not (left_out and every_hour):
            return moment
    return None


def _offset(local: datetime, fold: int) -> timedelta:
    offset = local.replace(fold=fold).utcoffset()
    assert offset is not None, "it has a zone"
    return offset


def _moment(local: datetime, fold: int) -> datetime:
    """The moment at which the clock shows a local time; if it never does, the first moment after the gap."""
    before, behind = _offset(local, 0), _offset(local, 1)
    naive = local.replace(tzinfo=UTC)
    if before >= behind:
        return naive - (behind if fold else before)
    # The clock is put forward between these two: the first second with the later offset.
    early, late = naive - behind, naive - before
    while late - early > timedelta(seconds=1):
        middle = early + (late - early) // timedelta(seconds=2) * timedelta(seconds=1)
        if middle.astimezone(local.tzinfo).utcoffset() == before:
            early = middle
        else:
            late = middle
    return late
