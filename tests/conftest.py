from __future__ import annotations

import inspect

import pytest
from hypothesis import HealthCheck, settings

from tests.support import fake_campaign

# On a shared machine how long a draw takes says nothing about the code: what is tested is what
# comes out.
settings.register_profile(
    "shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared-machine")


@pytest.fixture(autouse=True)
def _off_github(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures that tests provoke are no annotations of the job that runs the tests."""
    for variable in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Inner runs without Hypothesis' plugin: its closing summary imports all of Hypothesis, anew in
    every one of them.
    """
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
    return pytester


@pytest.fixture
def fake_runs(monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester) -> pytest.Pytester:
    """A pytester whose inner runs, in this process or in others, have the verdicts that their
    subjects name.
    """
    for module in (
        "pytest_plugin.decorators",
        "pytest_plugin.items",
        "pytest_plugin.session_state",
        "verification.expected_failures",
    ):
        monkeypatch.setattr(f"rollproof.{module}.default_registry", lambda: fake_campaign.REGISTRY)
    monkeypatch.setattr("rollproof.pytest_plugin.items.run", fake_campaign.run)
    monkeypatch.setenv("RUNS", str(pytester.path / "runs"))
    # where one of these is set, pytest repeats every failure whole in its summary
    for variable in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(variable, raising=False)
    pytester.makepyfile(fake_campaign=inspect.getsource(fake_campaign))
    pytester.makeconftest("import fake_campaign\nfake_campaign.install()\n")
    return pytester
