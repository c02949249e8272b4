"""How much of its throughput does a broker keep with TLS, next to what a bare server keeps?

The loads are those of `e2e_1kb_batched` and `e2e_100b_batched`, as long as there.

The figure is (ours with TLS / ours plain) / (bare server with TLS / bare server plain), all four in one run:
what TLS costs Tailrace, relative to what it costs a program that does nothing but receive the same bytes
through the same library. 1 says that encrypting costs the same share of either. All raw figures are among the
conditions.
"""

from __future__ import annotations

from bench import certificates
from bench.certificates import CertificateFiles
from bench.harness import Case, Run
from bench.identified import configuration, first_token, showing
from bench.load import MB, Load
from bench.results import Sample, significant


def kilobyte(run: Run) -> list[Sample]:
    """1 KB values by `send_many` of 500, read by `reader.batches()`."""
    return [_share(run, "tls_share_1kb", 1024)]


def small(run: Run) -> list[Sample]:
    """100-byte values, otherwise the same."""
    return [_share(run, "tls_share_100b", 100)]


def _share(run: Run, name: str, value_bytes: int) -> Sample:
    made = certificates.make(run.folder)
    load = Load(
        mode="send_many",
        reading="batches",
        value_bytes=value_bytes,
        seconds=run.seconds,
        bytes_max=run.bytes_max,
    )
    plain = _plain(run, load)
    bare = run.limit(batch=load.batch, value_bytes=value_bytes)
    encrypted = _encrypted(run, load, made)
    bare_encrypted = run.limit(batch=load.batch, value_bytes=value_bytes, through=made)
    kept, bare_kept = encrypted / plain, bare_encrypted / bare if bare else 1.0
    said: dict[str, object] = {
        "payload_bytes": value_bytes,
        "batch": load.batch,
        "durability": "interval",
        "partitions": 1,
        "plain_msg_s": round(plain),
        "tls_msg_s": round(encrypted),
        "tls_over_plain": significant(kept),
        "tls_mb_s": round(encrypted * value_bytes / MB, 1),
        "bare_msg_s": round(bare),
        "bare_tls_msg_s": round(bare_encrypted),
        "bare_tls_over_plain": significant(bare_kept),
        "plain_of_bare": significant(plain / bare) if bare else None,
        "tls_of_bare_tls": significant(encrypted / bare_encrypted) if bare else None,
        "clients": "token of an administrator, certificate checked",
    }
    return Sample(name=name, value=kept / bare_kept, unit="ratio", conditions=said)


def _plain(run: Run, load: Load) -> float:
    with run.broker("plain") as broker:
        return run.drive(broker, load).received.rate


def _encrypted(run: Run, load: Load, made: CertificateFiles) -> float:
    flags = configuration(run.folder, made)
    with (
        run.broker("encrypted", flags=flags, scheme="tailraces") as broker,
        showing(ca=made.authority, token=first_token(broker)),
    ):
        return run.drive(broker, load).received.rate


KILOBYTE = Case(("tls_share_1kb",), 30.0, kilobyte)
SMALL = Case(("tls_share_100b",), 10.0, small)
