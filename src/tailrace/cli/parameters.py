"""Options that many commands share, so that they read and behave the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON lines (documented in docs/operations.md).")]

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="TAILRACE_URL",
        show_default="tailrace://127.0.0.1:7400",
        help="The broker: tailrace://HOST:PORT[,HOST:PORT...], tailraces:// with TLS, unix:PATH, or "
        "embedded:FOLDER for a folder by itself.",
    ),
]

Timeout = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds to wait for an answer.")]

Prefix = Annotated[str, typer.Argument(help="Only names that start like this.", show_default=False)]

IfMissing = Annotated[bool, typer.Option("--if-missing", help="One that exists already is fine.")]

Resume = Annotated[bool, typer.Option("--resume", help="Go on instead.")]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

MessagesMax = Annotated[int | None, typer.Option("--max", "-n", min=1, help="Stop after so many messages.")]

TopicName = Annotated[str, typer.Argument(help="Name of the topic.", show_default=False)]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="Option of the topic (repeat for more). The value is JSON where it parses, else text.",
    ),
]

Partitions = Annotated[int | None, typer.Option("--partitions", min=1, help="Number of partitions.")]

GroupName = Annotated[str, typer.Argument(help="Name of the group.", show_default=False)]

GroupSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="Option of the group (repeat for more): lease_ms, ordering, max_attempts and so on.",
    ),
]
