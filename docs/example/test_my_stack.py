import rollproof
from my_client import MyClient

class MyStack:
    flavours = ("vllm",)  # the engines that it supports; omit it to test every compatible engine (slower)
    contract = rollproof.Contract(  # what it promises its trainer
        rows="T-1", provenance="as-sampled", resume="client", abort_surfaces=False, versions="none", logprobs="raw",
        layer_axis="all", num_layers=4, moe_layers=(1, 2, 3), num_experts=16, top_k=2, filler="none", dtype="uint8", kv_policy="recompute")
    def start(self, fleet): self.fleet, self.client = fleet, MyClient(fleet)
    async def rollout(self, request): return await self.client.generate(request)
    async def update_weights(self, version): await self.fleet.sync(version)
    def to_record(self, sample): return rollproof.Rollout(**sample)
    def stop(self): pass

@rollproof.conformance(MyStack)
def test_rollouts(check): ...
