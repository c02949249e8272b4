"""One suite for every `TopicFolders`: intents become cards, and what was never confirmed can be withdrawn.

Covers `storage/files/topic_folders.py`.
"""

from pathlib import Path

import pytest

from tailrace.core.catalog.catalog import TopicEntry
from tailrace.core.catalog.inventory import TopicCard, TopicFolder
from tailrace.core.model.topic_options import TopicOptions
from tailrace.ports import LogStore, TopicFolders
from tailrace.sim.sim_disk import SimDisk
from tailrace.storage.files.file_store import FileStore
from tests.storage.frame_maker import FrameMaker, TestClock, unheard

CARD = TopicCard(TopicEntry("eu/orders", 7, TopicOptions(partitions=2), 5), 3)
FOLDER = CARD.entry.folder


@pytest.fixture(params=["real", "simulated"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LogStore:
    return FileStore(tmp_path / "data" if request.param == "real" else SimDisk(1), TestClock())


@pytest.fixture
def folders(store: LogStore) -> TopicFolders:
    assert store.folders is not None
    return store.folders


def test_an_intent_becomes_the_card(folders: TopicFolders) -> None:
    assert folders.survey() == []
    assert not folders.exists(FOLDER)
    folders.intend(CARD)
    assert folders.survey() == [TopicFolder(FOLDER, intent=CARD)]
    assert folders.exists(FOLDER)
    folders.confirm(FOLDER)
    assert folders.survey() == [TopicFolder(FOLDER, CARD)]


def test_what_is_withdrawn_leaves_the_card_as_it_was(folders: TopicFolders) -> None:
    folders.intend(CARD)
    folders.confirm(FOLDER)
    larger = TopicCard(CARD.entry, 4)
    folders.intend(larger)
    assert folders.survey() == [TopicFolder(FOLDER, CARD, larger)]
    folders.withdraw(FOLDER)
    folders.withdraw(FOLDER)
    assert folders.survey() == [TopicFolder(FOLDER, CARD)]


def test_a_folder_is_discarded_with_all_that_it_holds(store: LogStore, folders: TopicFolders) -> None:
    folders.intend(CARD)
    log = store.log(f"{FOLDER}/0", unheard)
    log.recover()
    log.close()
    assert folders.exists(f"{FOLDER}/0")
    assert not folders.exists(f"{FOLDER}/1")
    assert folders.survey()[0].unwritten
    folders.discard(FOLDER)
    assert folders.survey() == []


def test_the_survey_says_which_partitions_were_written(store: LogStore, folders: TopicFolders) -> None:
    folders.intend(CARD)
    folders.confirm(FOLDER)
    for partition in range(2):
        log = store.log(f"{FOLDER}/{partition}", unheard)
        log.recover()
        if partition:
            log.append([FrameMaker().data()], sync=True)
        log.close()
    assert folders.survey() == [TopicFolder(FOLDER, CARD, None, {0: False, 1: True})]
