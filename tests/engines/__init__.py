"""Tests of engine conformance."""
