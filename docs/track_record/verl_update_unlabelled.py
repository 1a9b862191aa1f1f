"""``update_weights()`` without a step, as trainer_base.py calls it before validation: new weights, served under the old tag."""

from verl_stub import VERSION
from verl_update_stub import manager

engine, replica = manager()
engine.update_weights()  # runs a loop of its own outside of one
print(
    VERSION,
    "weights loaded",
    len(replica.loaded),
    "time after step 1; the server still tags with step",
    replica.step,
)
