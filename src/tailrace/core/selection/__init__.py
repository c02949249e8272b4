"""Selection row by row: the messages that go next where lanes or shared keys matter."""
