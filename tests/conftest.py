"""Options and rules of the whole test run: --long, hypothesis profiles, two processes, no silent skips.

`make test` runs the tests in two processes (`-n 2 --dist loadgroup`): each takes the next test when it
has finished one. Tests that share the one Spark session are a group, which stays in one process and begins
first; tests marked `long` come next, so that none of them is left for the end. What measures time or memory
of the machine is marked `alone`: it runs afterwards, in one process, when nothing else does.
"""

import os
from collections.abc import Generator
from importlib.metadata import entry_points

import pytest
from hypothesis import HealthCheck, settings

# The fixtures of tailrace.testing come by entry point where the package is installed, as they do for users.
pytest_plugins = [] if entry_points(group="pytest11", name="tailrace") else ["tailrace.testing.plugin"]

LONG_TIMEOUT_S = 600
"""For one test with --long: twenty times as many examples take longer than the limit of pyproject.toml."""

settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=100, database=None, print_blob=True
)
settings.register_profile(
    "long",
    deadline=None,
    max_examples=2000,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long, with more examples")
    parser.addoption("--part", choices=("shared", "alone"), help="only the tests marked alone, or all others")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out by deselecting them: a skip in the report always means a problem."""
    left_out = [item for item in items if _left_out(config, item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _left_out(config, item)]
    for item in items:
        if config.getoption("--long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("long") is None)


def _left_out(config: pytest.Config, item: pytest.Item) -> bool:
    if item.get_closest_marker("long") and not config.getoption("--long"):
        return True
    part = config.getoption("--part")
    return bool(part) and (part == "alone") != bool(item.get_closest_marker("alone"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged may have lone surrogates; reports are sent as UTF-8 from process to process."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def _skips(config: pytest.Config) -> list[pytest.TestReport | pytest.CollectReport]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return list(reporter.stats.get("skipped", [])) if reporter else []


def _refused(reports: list[pytest.TestReport | pytest.CollectReport]) -> bool:
    """In CI no skip is accepted; elsewhere only those of components which must be there."""
    if os.environ.get("CI") == "true":
        return bool(reports)
    return any("required_component" in getattr(report, "keywords", ()) for report in reports)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and session.exitstatus == pytest.ExitCode.OK and _refused(_skips(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = _skips(config)
    if not reports:
        return
    terminalreporter.section(f"{len(reports)} SKIPPED", sep="!", red=True, bold=True)
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.line(f"  {report.nodeid}: {reason}")
    if _refused(reports):
        terminalreporter.line("  The run FAILS: these must not be skipped here.", red=True)
