"""Guessing passwords is slow, nobody else is locked out for it, and made-up names take no memory."""

from random import Random

from tailrace.core.access.slow_down import (
    FORGIVEN_US,
    FREE_OF_ADDRESS,
    FREE_OF_USER,
    PENDING_MAX,
    PENDING_SLOW_MAX,
    SLOW_MAX,
    STEP_US,
    TABLE_MAX,
    USER_WAIT_US_MAX,
    WAIT_US_MAX,
    SlowDown,
    network_of,
)

SECOND = 1_000_000


class Guesser:
    """Tries passwords, each when the one before was answered."""

    def __init__(self, slow_down: SlowDown) -> None:
        self.slow_down = slow_down
        self.now_us = 10 * SECOND

    def tries(self, address: str, user: str, right: bool) -> int:
        """The wait of one attempt."""
        wait_us = self.slow_down.begin(address, user, self.now_us)
        assert wait_us is not None
        self.now_us += wait_us
        self.slow_down.end(address, user, wait_us, right, self.now_us)
        return wait_us


def test_each_failure_makes_the_next_attempt_wait_longer() -> None:
    guesser = Guesser(SlowDown())
    waits = [guesser.tries("10.0.0.1", "anna", False) for _ in range(9)]
    assert waits[0] == 0
    assert waits[1] == STEP_US
    assert waits == sorted(waits)
    assert waits[-1] == WAIT_US_MAX


def test_the_right_password_waits_too_and_ends_the_waits_of_the_pair() -> None:
    guesser = Guesser(SlowDown())
    for _ in range(3):
        guesser.tries("10.0.0.1", "anna", False)
    assert guesser.tries("10.0.0.1", "anna", True) > 0
    assert guesser.tries("10.0.0.1", "anna", True) == 0


def test_whoever_has_one_password_gets_no_more_guesses_at_others() -> None:
    guesser = Guesser(SlowDown())
    for number in range(FREE_OF_ADDRESS + 6):
        guesser.tries("10.0.0.1", f"user-{number}", False)
        guesser.tries("10.0.0.1", "mallory", True)
    assert guesser.tries("10.0.0.1", "anna", False) >= 16 * STEP_US


def test_others_do_not_wait() -> None:
    guesser = Guesser(SlowDown())
    assert guesser.tries("10.0.0.9", "bert", True) == 0
    for _ in range(50):
        guesser.tries("10.0.0.1", "anna", False)
    assert guesser.tries("10.0.0.2", "carl", False) == 0
    assert guesser.tries("10.0.0.9", "bert", True) == 0


def test_a_user_that_others_attack_waits_little_and_not_where_it_is_known() -> None:
    guesser = Guesser(SlowDown())
    assert guesser.tries("10.0.0.9", "anna", True) == 0
    for number in range(100):
        guesser.tries(f"10.0.1.{number}", "anna", False)
    assert guesser.tries("10.0.0.9", "anna", True) == 0
    assert 0 < guesser.tries("10.0.0.8", "anna", True) <= USER_WAIT_US_MAX


def test_an_address_that_many_share_may_fail_some_times() -> None:
    guesser = Guesser(SlowDown())
    for number in range(FREE_OF_ADDRESS):
        assert guesser.tries("10.0.0.1", f"user-{number}", False) == 0
    assert guesser.tries("10.0.0.1", "other", False) == 0
    assert guesser.tries("10.0.0.1", "another", False) > 0


def test_a_user_may_fail_some_times() -> None:
    guesser = Guesser(SlowDown())
    for number in range(FREE_OF_USER + 1):
        assert guesser.tries(f"10.0.0.{number}", "anna", False) == 0
    assert guesser.tries("10.0.1.1", "anna", False) > 0


def test_attempts_side_by_side_get_their_turns_one_after_the_other() -> None:
    slow_down = SlowDown()
    guesser = Guesser(slow_down)
    for _ in range(3):
        guesser.tries("10.0.0.1", "anna", False)
    waits = [slow_down.begin("10.0.0.1", "anna", guesser.now_us) for _ in range(3)]
    assert waits == [4 * STEP_US, 8 * STEP_US, 12 * STEP_US]


def test_few_attempts_of_a_pair_wait_at_once() -> None:
    slow_down = SlowDown()
    now_us = 5
    for _ in range(PENDING_MAX):
        assert slow_down.begin("10.0.0.1", "anna", now_us) == 0
    assert slow_down.begin("10.0.0.1", "anna", now_us) is None
    assert slow_down.begin("10.0.0.2", "anna", now_us) == 0
    for _ in range(PENDING_MAX):
        slow_down.end("10.0.0.1", "anna", 0, False, now_us)
    waits = [slow_down.begin("10.0.0.1", "anna", now_us) for _ in range(PENDING_SLOW_MAX + 1)]
    assert waits[-1] is None
    assert all(waits[:-1])
    assert max(wait for wait in waits if wait) <= WAIT_US_MAX


def test_who_is_known_behind_an_address_is_not_locked_out_by_others_there() -> None:
    """A flood of guesses at many users from one address, where anna has logged in before."""
    slow_down = SlowDown()
    guesser = Guesser(slow_down)
    guesser.tries("10.0.0.1", "anna", True)
    for number in range(100):
        guesser.tries("10.0.0.1", f"user-{number}", False)
    flood = [slow_down.begin("10.0.0.1", f"other-{number}", guesser.now_us) for number in range(100)]
    assert sum(wait is not None for wait in flood) == PENDING_MAX
    assert slow_down.begin("10.0.0.1", "bert", guesser.now_us) is None
    assert guesser.tries("10.0.0.1", "anna", True) == 0


def test_all_who_wait_are_bounded_together() -> None:
    slow_down = SlowDown()
    guesser = Guesser(slow_down)
    for number in range(100):
        guesser.tries(f"10.0.0.{number}", "anna", False)
    begun = [
        slow_down.begin(f"10.1.{number // 250}.{number % 250}", "anna", guesser.now_us)
        for number in range(SLOW_MAX + 10)
    ]
    assert begun.count(None) == 10
    assert slow_down.begin("10.2.0.1", "bert", guesser.now_us) == 0


def test_time_forgives() -> None:
    guesser = Guesser(SlowDown())
    for _ in range(12):
        guesser.tries("10.0.0.1", "anna", False)
    guesser.now_us += 6 * FORGIVEN_US
    before = guesser.tries("10.0.0.1", "anna", True)
    assert before > 0
    guesser = Guesser(guesser.slow_down)
    guesser.now_us += 1000 * FORGIVEN_US
    assert guesser.tries("10.0.0.1", "anna", False) == 0


def test_what_was_not_checked_counts_for_nothing() -> None:
    slow_down = SlowDown()
    for _ in range(100):
        assert slow_down.begin("10.0.0.1", "anna", 1) == 0
        slow_down.end("10.0.0.1", "anna", 0, None, 1)
    assert slow_down.rows == 0


def test_made_up_names_and_addresses_take_bounded_memory() -> None:
    slow_down, random = SlowDown(), Random(3)
    for number in range(3 * TABLE_MAX):
        address, user = f"10.{number % 250}.{number // 250 % 250}.1", "x" * 4000 + str(number)
        wait_us = slow_down.begin(address, user, number)
        if wait_us is not None:
            slow_down.end(address, user, wait_us, random.random() < 0.3, number)
    assert slow_down.rows <= 4 * TABLE_MAX


def test_of_an_ipv6_address_the_network_counts() -> None:
    assert network_of("2001:db8:1:2:3::4") == network_of("2001:db8:1:2:ffff::1") == "2001:db8:1:2::"
    assert network_of("2001:db8:1:2::1") != network_of("2001:db8:1:3::1")
    assert network_of("fe80::1%eth0") == "fe80::"
    assert network_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("") == ""
    assert network_of("no:address") == "no:address"
