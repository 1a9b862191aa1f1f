"""The GPU suites: real engines and trainers, as far as the host has them."""
