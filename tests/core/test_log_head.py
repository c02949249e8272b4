"""The head that the parts of a partition share."""

from tailrace.core.log_head import LogHead
from tailrace.core.model.topic_options import TopicOptions


def test_time_does_not_go_back() -> None:
    head = LogHead(TopicOptions())
    for time_us, wanted in ((5, 5), (3, 5), (6, 6)):
        head.pass_time(time_us)
        assert head.append_time_us == wanted
