"""A server that leaves the balancer and comes back starts at 0, whatever still runs on it: the count stays too low from then on."""

from verl_stub import VERSION, Balancer

balancer = Balancer({"a": None, "b": None})
server, _ = balancer.acquire_server("r0")
balancer.remove_servers([server])
balancer.add_servers({server: None})
balancer.acquire_server("r0")  # a second request on it; r0's first one still runs
balancer.release_server(server)  # ... and now it ends
print(
    VERSION,
    "one request runs on the server; the balancer counts",
    balancer.get_inflight_count(server),
)
