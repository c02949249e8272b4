"""Topic cards: the entry of a topic, as a small checksummed file in the topic's own folder.

The catalog is one file. The card of a topic repeats its entry where the data lies. So a lost catalog can be
rebuilt, and a catalog that is older than its topics is noticed. The text is readable JSON; the checksum
covers the bytes of the card as they are.
"""

from __future__ import annotations

import msgspec

from tailrace.core.catalog.inventory import TopicCard
from tailrace.errors import Corrupt
from tailrace.format.frame import crc32c


class _StoredCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    crc: int
    card: msgspec.Raw


def encode_card(card: TopicCard) -> bytes:
    """The content of the file."""
    text = msgspec.json.encode(card)
    return msgspec.json.encode(_StoredCard(1, crc32c(text), msgspec.Raw(text)))


def decode_card(data: bytes) -> TopicCard:
    """The card in a file; raises `Corrupt`."""
    try:
        stored = msgspec.json.decode(data, type=_StoredCard)
        if crc32c(bytes(stored.card)) != stored.crc:
            raise Corrupt("the checksum of the topic's card is wrong")
        return msgspec.json.decode(stored.card, type=TopicCard)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the topic's card cannot be read: {error}") from error
