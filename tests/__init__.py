"""The project's own tests; tests/README.md is the map."""
