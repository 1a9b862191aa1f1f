"""A weight transfer that fails leaves every replica paused and without KV cache: nothing in ``update_weights`` resumes them."""

from verl_stub import VERSION
from verl_update_stub import manager

engine, replica = manager(fails=True)
try:
    engine.update_weights(2)
except RuntimeError as error:
    print(VERSION, f"after {error!r}: paused {replica.paused}, KV cache there {replica.kv}")
