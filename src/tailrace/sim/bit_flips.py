"""Bits that flip on the disk of a log: what the log says of it, and that flipping them back heals it."""

from __future__ import annotations

from tailrace.errors import Corrupt
from tailrace.format.frame import BARRIER, DATA, parse
from tailrace.ports import Recovery
from tailrace.sim.log_checks import LOG, CheckedLog, LogViolation
from tailrace.storage.files.opening import read_mark
from tailrace.storage.files.segment import first_entry


class FlippedLog(CheckedLog):
    """A checked log that suffers bit flips."""

    def _flip_at_rest(self) -> None:
        """Close or stop, flip one bit, open, check what is said of it, flip it back and open again."""
        if self.disk.lying:
            return
        fate = self.random.choice(("close", "restart", "crash"))
        if fate == "close":
            self.log.close()
            self.model.synced()
        elif fate == "crash":
            self.disk.crash()
        self.disk.restart()
        self.disk.enlarge()
        path, position, bit = self._pick_bit()
        proven = self._proven_position(path)
        self.disk.flip(path, position, bit)
        self.log = self._take_log()
        recovery = self.log.recover()
        outcome = self._judge_flip(recovery, path, position, proven)
        self.seen[outcome] += 1
        self.disk.restart()
        if recovery.fault is None:
            self.model.cut(recovery.end_entry)
            self.model.synced()
        if path.rpartition("/")[2] in self.disk.list(LOG):
            self.disk.flip(path, position, bit)
        self._repaired(recovery)

    def _repaired(self, damaged: Recovery) -> None:
        self.log = self._take_log()
        self._check_recovery(self.log.recover())
        if damaged.fault is not None:
            self.seen["damage gone after repair"] += 1

    def _pick_bit(self) -> tuple[str, int, int]:
        names = [name for name in self.disk.list(LOG) if self.disk.content(f"{LOG}/{name}")]
        logs = [name for name in names if first_entry(name) is not None]
        path = f"{LOG}/{self.random.choice(logs if logs and self.random.random() < 0.7 else names)}"
        return path, self.random.randrange(len(self.disk.content(path))), self.random.randrange(8)

    def _proven_position(self, path: str) -> int:
        """Up to where something says that this segment was synced; no limit for sealed ones."""
        entry = first_entry(path.rpartition("/")[2])
        entries = [first_entry(name) for name in self.disk.list(LOG) if first_entry(name) is not None]
        if entry is None or entry != entries[-1]:
            return 1 << 62
        mark = read_mark(self.disk, LOG)
        marked = mark.position if mark and mark.segment == entry else 0
        return max(_synced_by_barriers(bytes(self.disk.content(path))), marked)

    def _judge_flip(self, recovery: Recovery, path: str, position: int, proven: int) -> str:
        """What became of a flip; anything that is served must be true all the same."""
        model = self.model
        fallback = recovery.snapshot is None or recovery.snapshot.entry < model.saved
        if recovery.fault is not None:
            self._check_frames_below(recovery)
            self._check_refuses()
            return "damage found when opened"
        try:
            self._check_frames(recovery)
            self._compare_data(0, min(model.end_offset, recovery.end_offset), 1000)
        except Corrupt as error:
            self._require(error.path == path, f"damage in {path} was reported in {error.path}")
            quarantined = self.log.stats().fault is not None
            return "damage found when replayed" if quarantined else "damage found when read"
        if recovery.end_entry < model.durable:
            self._require(recovery.cut_bytes > 0, "acknowledged frames went without a word")
            self._require(position >= proven, f"a flip at {position} was cut although {proven} was proven")
            return "flip passed for a torn tail"
        if fallback and model.saved >= 0:
            return "snapshot fell back"
        return "flip harmless"

    def _check_frames_below(self, recovery: Recovery) -> None:
        try:
            self._check_frames(recovery)
            self._compare_data(0, min(recovery.end_offset, self.model.end_offset), 1000)
        except Corrupt:
            self.seen["damage found when read"] += 1

    def _check_refuses(self) -> None:
        frame = self._frame(DATA, 0, len(self.model.frames), self.model.end_offset, 0)
        try:
            self.log.append([frame], sync=True)
        except Corrupt as error:
            self._require(str(error.path).startswith(LOG), "the refusal does not name the file")
        else:
            raise LogViolation("a damaged log took an append")

    def _flip_while_open(self) -> None:
        """A bit of a frame flips under an open log: the read that covers it must notice."""
        if self.disk.lying or self.disk.crash_in is not None:
            return
        # On a full disk, or one that fails, there is no note.
        self.disk.enlarge()
        self.disk.obey()
        path, position, bit = self._pick_bit()
        self.disk.flip(path, position, bit)
        self._told.clear()
        found = False
        try:
            if self.random.random() < 0.5:
                self._compare_data(0, self.model.end_offset, 1 << 20)
            else:
                self._scrub()
        except Corrupt:
            found = True
        if found:
            self.seen["damage found when read"] += 1
            self._require(len(self._told) == 1, "damage was found by reading, and nobody was told")
            self._check_refuses()
            # It survives the process: the note names the file, which is checked whole.
            self.disk.restart()
            self.log = self._take_log()
            recovery = self.log.recover()
            self._require(recovery.fault is not None, "damage that was found is forgotten after a restart")
        if path.rpartition("/")[2] in self.disk.list(LOG):
            self.disk.flip(path, position, bit)
        if found:
            self.disk.restart()
            self.log = self._take_log()
            self._check_recovery(self.log.recover())

    def _scrub(self) -> None:
        entry: int | None = 0
        while entry is not None:
            entry = self.log.scrub(entry, 1000).next_entry


def _synced_by_barriers(content: bytes) -> int:
    """The highest synced position that a barrier tells, read from the start, frame by frame.

    Not with the log's own search: a mistake in that must not vouch for itself.
    """
    position = synced = 0
    while position < len(content):
        try:
            header = parse(content, position)
        except Corrupt:
            break
        if header.kind == BARRIER:
            synced = max(synced, header.append_time_us)
        position += header.size
    return synced
