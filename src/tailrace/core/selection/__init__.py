"""Which messages go next where lanes or shared keys matter, row by row."""
