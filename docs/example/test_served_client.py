from served_client import generate


def test_generate(rollproof_sglang):
    rollproof_sglang("served_contract.toml", plan="served_plan.toml")  # or a rollproof.Contract
    generate([5, 6, 7, 8], max_tokens=8)
