"""The fixtures `rollproof_sglang` and `rollproof_vllm`: fake servers, judged at the end of a test.

In processes of their own: what httpx imports at its first call would otherwise be gone from
`sys.modules` at the end of the inner session, and be imported a second time.
"""

from __future__ import annotations

import json

import pytest

from tests.support.inner_pytest import summary

FILE = """
import os
import httpx
import pytest
import rollproof
from rollproof.http_clients import httpx_hooks, rollout

CONTRACT = rollproof.Contract(
    rows="none", resume="client", versions="none", logprobs="none", abort_surfaces=False,
    kv_policy="recompute",
)

@rollout
def generate(url, prompt, lost=0):
    with httpx.Client(base_url=url, event_hooks=httpx_hooks()) as client:
        tokens = []
        reason = "abort"
        while reason == "abort":
            reply = client.post("/generate", json={
                "input_ids": [*prompt, *tokens],
                "sampling_params": {"max_new_tokens": 6 - len(tokens)},
            }).json()
            tokens += reply["output_ids"]
            reason = reply["meta_info"]["finish_reason"]["type"]
    return {
        "prompt_ids": prompt, "response_ids": tokens[:6 - lost], "finish_reason": reason,
    }
"""
ABORT = '{"actions": [{"do": "abort", "when": {"request": "r1", "tokens": 2}}]}'


def test_a_finding_fails_the_test_with_its_story(pytester: pytest.Pytester) -> None:
    """In the call of the test, and in one line of the short summary; correct tests pass."""
    pytester.makepyfile(
        test_it=FILE
        + f"""
def test_correct(rollproof_sglang):
    fleet = rollproof_sglang(CONTRACT, plan={ABORT}, servers=2)
    assert (os.environ["ROLLPROOF_URL"], 2) == (fleet.url, len(fleet.urls))
    generate(fleet.url, [5, 6, 7])
    fleet.update_weights("step-1")
    generate(fleet.urls[0], [5, 6, 7])

def test_faulty(rollproof_sglang):
    fleet = rollproof_sglang(CONTRACT, plan={ABORT}, save="faulty.json")
    generate(fleet.url, [5, 6, 7], lost=1)
"""
    )
    result = pytester.runpytest_subprocess("--rollproof-report=report.json")

    result.assert_outcomes(passed=1, failed=1)
    said = str(result.stdout)
    assert "action 1 (abort of 'r1' at 2 tokens): happened" in said
    assert ">> r1 delivered: 5 tokens, ended by length" in said
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_faulty - stitch.tokens: *"])
    assert "_ ERROR at" not in said
    assert "::test_correct  [profile recorded" in summary(result)
    reports = json.loads((pytester.path / "report.json").read_text(encoding="utf-8"))["reports"]
    assert [0, 1] == [min(report["summary"]["fail"], 1) for report in reports]
    assert (pytester.path / "faulty.json").exists()


def test_a_test_in_which_nothing_was_judged_is_unknown(pytester: pytest.Pytester) -> None:
    """No call, no sample, no check; skipped if the session says so."""
    pytester.makepyfile(
        test_it=FILE
        + """
def test_no_call(rollproof_vllm):
    rollproof_vllm(CONTRACT)

def test_no_sample(rollproof_sglang):
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
    httpx.post(rollproof_sglang(CONTRACT).url + "/generate", json=body)

def test_no_check(rollproof_sglang):
    fleet = rollproof_sglang(CONTRACT, only=["weights.updates-end"])
    generate(fleet.url, [5, 6, 7])
"""
    )
    result = pytester.runpytest_subprocess("-rA")

    assert pytest.ExitCode.TESTS_FAILED == result.ret
    said = " ".join(summary(result).split())
    assert "No call reached the fake server at http://127.0.0.1:" in said
    assert "1 call reached the fake server, and no sample was reported: decorate" in said
    assert "No check could be judged" in said
    result.stdout.fnmatch_lines(["*3 unknown in*"])
    pytester.runpytest_subprocess("-o", "rollproof_unknown=skip").assert_outcomes(skipped=3)


def test_an_exception_of_the_test_comes_first(pytester: pytest.Pytester) -> None:
    """The trace of a test that fails by itself is saved and not judged; the servers end."""
    pytester.makepyfile(
        test_it=FILE
        + """
def test_own_failure(rollproof_sglang):
    fleet = rollproof_sglang(CONTRACT, save="own.json")
    generate(fleet.url, [5, 6, 7], lost=1)
    assert False, "its own"

def test_ended(rollproof_sglang):
    assert "ROLLPROOF_URL" not in os.environ
    with pytest.raises(rollproof.UsageError, match="takes the Contract that the client's samples"):
        rollproof_sglang(7)
    with pytest.raises(rollproof.UsageError, match="servers=0 must be"):
        rollproof_sglang(CONTRACT, servers=0)
    with pytest.raises(rollproof.UsageError, match="has no options .'port'."):
        rollproof_sglang(CONTRACT, options={"port": 3})
    with pytest.raises(rollproof.UsageError, match="A fault plan has no .'fault'."):
        rollproof_sglang(CONTRACT, plan={"fault": []})
    with pytest.raises(rollproof.UsageError, match="flavour='vllm' must be one of"):
        rollproof_sglang(CONTRACT, flavour="vllm")
"""
    )
    result = pytester.runpytest_subprocess()

    result.assert_outcomes(passed=1, failed=1)
    assert "stitch.tokens" not in str(result.stdout)
    assert (pytester.path / "own.json").exists()


def test_both_fixtures_serve_one_test(pytester: pytest.Pytester) -> None:
    """Rollouts are reported to the servers that they call, and each fleet is judged."""
    pytester.makepyfile(
        test_it=FILE
        + """
def test_both(rollproof_sglang, rollproof_vllm):
    first, second, third = (
        start(CONTRACT) for start in (rollproof_sglang, rollproof_vllm, rollproof_sglang)
    )
    for fleet in (first, third):
        generate(fleet.url, [5, 6, 7])

    @rollout
    def complete():
        with httpx.Client(base_url=second.url, event_hooks=httpx_hooks()) as client:
            (choice,) = client.post("/inference/v1/generate", json={
                "token_ids": [1, 2], "sampling_params": {"max_tokens": 3},
            }).json()["choices"]
        return {"prompt_ids": [1, 2], "response_ids": choice["token_ids"],
                "finish_reason": choice["finish_reason"]}

    complete()
"""
    )
    result = pytester.runpytest_subprocess()

    result.assert_outcomes(passed=1)
    assert 3 == summary(result).count("test_both  [profile recorded")
