"""GPU suites: real engines and trainers, gated by what the host has."""
