"""The timeline of a life: every event on a line of its own, and nothing that could steer a terminal."""

from uuid import UUID

from tailrace.cli.timeline import draw, draw_rich
from tailrace.client.admin.trace_client import Life, LifeEvent

T0 = 1_700_000_000_000_000
LIFE = Life(
    "orders",
    2,
    1042,
    UUID(int=1),
    b"cart-7",
    "mixed",
    {"billing": "dead", "mails": "free"},
    [
        LifeEvent(T0, "published"),
        LifeEvent(T0 + 413, "appended", details={"offset": 1042}),
        LifeEvent(
            T0 + 12_000, "delivered", "billing", "w1", 1, {"delivery": 1, "deadline_us": T0 + 30_012_000}
        ),
        LifeEvent(
            T0 + 1_204_417, "nacked", "billing", "w1", 1, {"error": "no\x1b[31m luck", "delay_us": 2_000_000}
        ),
        LifeEvent(
            T0 + 90_000_000_000,
            "dead_lettered",
            "billing",
            details={"topic": "orders.dlq", "partition": 2, "offset": 3},
        ),
    ],
    T0,
    "00-trace",
)


def test_a_life_is_drawn_line_by_line() -> None:
    assert draw(LIFE).splitlines() == [
        "orders/2@1042  00000000-0000-0000-0000-000000000001  key=cart-7  mixed",
        "  traceparent 00-trace",
        "  2023-11-14 22:13:20.000000  ●           published",
        "                   +0.000413  ●           appended       offset 1042",
        "                   +0.012000  ├─ billing  delivered      w1, attempt 1, until +30.000000",
        "                   +1.204417  ├─ billing  nacked         w1, attempt 1, after 2 s: no\\x1b[31m luck",
        "            +1d 01:00:00.000  └─ billing  dead_lettered  to orders.dlq/2@3",
        "  billing: dead   mails: free",
    ]


def test_colours_change_nothing_but_colours() -> None:
    assert draw_rich(LIFE).plain == draw(LIFE)


def test_a_message_without_an_offset_and_a_dead_letter() -> None:
    events = [
        LifeEvent(T0, "published"),
        LifeEvent(T0 - 1_000_000, "scheduled", details={"deliver_at_us": T0}),
    ]
    life = Life(
        "t", 0, None, UUID(int=2), None, "scheduled", {}, events, T0, None, {"topic": "o", "offset": "4"}
    )
    lines = draw(life).splitlines()
    assert lines[0] == "t/0  00000000-0000-0000-0000-000000000002  scheduled"
    assert lines[1] == "  dead letter of o/?@4"
    assert lines[3].split() == ["-1.000000", "●", "scheduled", "due", "+1.000000"]
