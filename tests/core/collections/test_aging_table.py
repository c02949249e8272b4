"""The aging table against a pair of dicts, over random puts, agings and snapshots."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.collections.aging_table import AgingTable
from tailrace.core.collections.hash_table import MISSING
from tests.core.oracle import hashes

KEYS = [str(number) for number in range(40)]
KEY = st.integers(0, len(KEYS) - 1)


@given(st.lists(st.one_of(KEY, st.sampled_from(["age", "restore"])), max_size=60))
def test_it_finds_what_was_put_since_the_aging_before_the_last(steps: list[int | str]) -> None:
    table, young, old = AgingTable(), dict[int, int](), dict[int, int]()
    names = hashes(KEYS)
    for value, step in enumerate(steps):
        if step == "age":
            table.age()
            young, old = {}, young
        elif step == "restore":
            before, table = table, AgingTable()
            table.load(before.buffers())
        elif isinstance(step, int):
            table.put_many(names[step : step + 1], np.array([value]))
            young[step] = value
        wanted = [{**old, **young}.get(key, MISSING) for key in range(len(KEYS))]
        assert table.get_many(names).tolist() == wanted
        assert [table.get(low, high) for low, high in names.tolist()] == wanted
        assert (table.young, table.old, len(table)) == (len(young), len(old), len(young) + len(old))
        table.check()
