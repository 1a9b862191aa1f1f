"""Helpers shared by the suites; nothing here is shipped."""
