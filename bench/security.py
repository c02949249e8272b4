"""The suite of encryption and identities: its bars, and the cases that are held against them."""

from __future__ import annotations

from bench.cases import auth_share, logins, tls_share, unix_share
from bench.harness import Suite
from bench.results import Bar

BARS = (
    Bar(name="tls_share_1kb", sense=">=", value=0.85),
    Bar(name="tls_share_100b", sense=">=", value=0.85),
    Bar(name="auth_share", sense=">=", value=0.97),
    Bar(name="logins_s", sense=">=", value=2_000),
    Bar(name="login_p99_growth", sense="<=", value=1.5),
    Bar(name="unix_share", sense=">=", value=1),
)

SUITE = Suite(
    "security",
    BARS,
    (
        tls_share.KILOBYTE,
        tls_share.SMALL,
        auth_share.CASE,
        logins.TOKENS,
        logins.PASSWORDS,
        unix_share.CASE,
    ),
)
