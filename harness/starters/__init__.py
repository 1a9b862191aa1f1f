"""Test files to start from, which ``rollproof init`` writes."""
