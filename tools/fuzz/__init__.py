"""Fuzzing: every reader of files, the command line and the endpoints of the fake servers."""
