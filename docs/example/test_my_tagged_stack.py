from dataclasses import replace

import rollproof
from my_tagged_client import MyTaggedClient

class MyTaggedStack:
    flavours = ("vllm",)  # shows the version of every token in out.spans
    contract = rollproof.Contract(
        rows="T-1", provenance="as-sampled", resume="client", abort_surfaces=False, versions="min-max", logprobs="raw",
        layer_axis="all", num_layers=4, moe_layers=(1, 2, 3), num_experts=16, top_k=2, filler="none", dtype="uint8", kv_policy="recompute")
    def start(self, fleet): self.fleet, self.client = fleet, MyTaggedClient(fleet)
    async def rollout(self, request): return await self.client.generate(request)
    async def update_weights(self, version): await self.fleet.sync(version)
    def to_record(self, sample): return rollproof.Rollout(**sample)
    def stop(self): pass

class MyTaggedStackOnOldSglang(MyTaggedStack):
    flavours = ("sglang-0.5.17",)  # shows one out.version a call, read when it answers
    contract = replace(MyTaggedStack.contract, logprobs="temperature-scaled", dtype="int32")
    def start(self, fleet):
        super().start(fleet)
        fleet.pause_mode = rollproof.PauseMode.ABORT  # an update that overtakes a running call would make that one label wrong

@rollproof.conformance(MyTaggedStack)
def test_rollouts(check): ...

@rollproof.conformance(MyTaggedStackOnOldSglang)
def test_rollouts_with_one_label_a_call(check): ...
