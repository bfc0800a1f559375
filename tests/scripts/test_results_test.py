"""scripts/test_results: which failures a second run may excuse, and what the summary counts."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "test_results"


def ctest_report(path, **tests):
    """ctest's JUnit file: tests by name, each (status, output)."""
    cases = "".join(f'<testcase name="{name}" status="{status}"><system-out>{output}</system-out></testcase>'
                    for name, (status, output) in tests.items())
    path.write_text(f"<testsuite>{cases}</testsuite>")


def gtest_report(path, **cases):
    """GoogleTest's file: cases of the suite S by name, each "run", "skip" or "fail"."""
    rows = "".join(f'<testcase name="{name}" status="run" result="{"skipped" if how == "skip" else "completed"}" '
                   f'classname="S">{"<failure/>" if how == "fail" else ""}</testcase>' for name, how in cases.items())
    path.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")


class TestResultsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = pathlib.Path(folder.name)
        for name in ("release", "release.again"):
            (self.results / name).mkdir()
        (self.results / "check.log").write_text("7 passed, 0 failed\n")
        (self.results / "release.ctest.log").write_text("")

    def report(self, log="", **tests):
        ctest_report(self.results / "release.ctest.xml", **tests)
        (self.results / "release.ctest.log").write_text(log)

    def cases(self, test, again=False, **cases):
        gtest_report(self.results / ("release.again" if again else "release") / f"{test}.xml", **cases)

    def second_run(self, test, status):
        ctest_report(self.results / "release.again" / f"{test}.ctest.xml", **{test: (status, "")})

    def failed(self):
        return subprocess.run([PROGRAM, "failed", self.results, "release"], check=True, text=True,
                              capture_output=True).stdout

    def summary(self, *flags):
        run = subprocess.run([PROGRAM, "summary", self.results, *flags], text=True, capture_output=True)
        return run.returncode, run.stdout.splitlines()

    def test_cases_are_counted_one_by_one(self):
        self.report(door_test=("run", ""), python=("run", ""), other=("notrun", ""))
        self.cases("door_test", A="run", B="skip")
        self.assertEqual(self.failed(), "")
        self.assertEqual(self.summary(), (0, ["skipped:  release: S.B", "skipped:  release: other",
                                              "9 passed, 0 failed, 2 skipped"]))

    def test_only_the_cases_that_failed_run_again(self):
        self.report(door_test=("fail", ""), python=("fail", ""))
        self.cases("door_test", A="run", B="fail", C="fail")
        self.assertEqual(self.failed(), "door_test\tS.B:S.C\npython\t*\n")

    def test_what_passes_the_second_time_is_unsteady(self):
        self.report(door_test=("fail", ""), python=("fail", ""))
        self.cases("door_test", A="run", B="fail")
        self.cases("door_test", again=True, B="run")
        self.second_run("door_test", "run")
        self.second_run("python", "run")
        self.assertEqual(self.summary(), (0, ["UNSTEADY: release: S.B", "UNSTEADY: release: python",
                                              "10 passed, 0 failed, 0 skipped"]))

    def test_what_fails_twice_has_failed(self):
        self.report(door_test=("fail", ""))
        self.cases("door_test", A="run", B="fail")
        self.cases("door_test", again=True, B="fail")
        self.second_run("door_test", "fail")
        self.assertEqual(self.summary(), (1, ["failed:   release: S.B", "8 passed, 1 failed, 0 skipped"]))

    def test_a_second_run_without_the_case_excuses_nothing(self):
        self.report(door_test=("fail", ""))
        self.cases("door_test", B="fail")
        self.cases("door_test", again=True)
        self.second_run("door_test", "run")
        self.assertEqual(self.summary()[0], 1)

    def test_a_sanitizers_report_is_final(self):
        self.report(door_test=("fail", "==1==ERROR: AddressSanitizer: heap-use-after-free"))
        self.cases("door_test", A="run", B="fail")
        self.assertEqual(self.failed(), "")
        self.cases("door_test", again=True, B="run")
        self.second_run("door_test", "run")
        self.assertEqual(self.summary(), (1, ["failed:   release: S.B", "failed:   release: door_test",
                                              "8 passed, 2 failed, 0 skipped"]))

    def test_a_report_after_cases_that_passed_is_final(self):
        self.report(engine_test=("fail", "WARNING: ThreadSanitizer: data race"))
        self.cases("engine_test", A="run")
        self.assertEqual(self.failed(), "")
        self.assertEqual(self.summary(), (1, ["failed:   release: engine_test", "8 passed, 1 failed, 0 skipped"]))

    def test_a_crash_is_final(self):
        self.report(engine_test=("fail", ""))  # it wrote no report of its cases
        self.assertEqual(self.failed(), "")
        self.assertEqual(self.summary()[0], 1)

    def test_a_hang_is_final(self):
        self.report("1/1 Test #1: python ...........................***Timeout 300.01 sec\n", python=("fail", ""))
        self.assertEqual(self.failed(), "")
        self.second_run("python", "run")
        self.assertEqual(self.summary()[0], 1)

    def test_with_a_gpu_its_tests_may_not_skip(self):
        self.report(kernels_gpu_test=("run", ""), door_test=("run", ""))
        self.cases("kernels_gpu_test", A="skip")
        self.cases("door_test", B="skip")
        self.assertEqual(self.summary("--gpu"), (1, ["failed:   release: S.A", "skipped:  release: S.B",
                                                     "7 passed, 1 failed, 1 skipped"]))

    def test_a_broken_build_or_check_has_failed(self):
        self.report(door_test=("run", ""))
        (self.results / "broken").write_text("build of asan\n")
        (self.results / "check.log").write_text("FAIL format\n6 passed, 1 failed\n")
        self.assertEqual(self.summary(), (1, ["failed:   check: format", "failed:   build of asan",
                                              "7 passed, 2 failed, 0 skipped"]))


if __name__ == "__main__":
    sys.exit(unittest.main())
