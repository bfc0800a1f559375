"""deploy/prometheus and deploy/grafana: alerts by promtool, every query by a Prometheus that scrapes two servers."""

import dataclasses
import importlib.machinery
import importlib.util
import json
import math
import pathlib
import re
import shutil
import tempfile
import unittest
import urllib.parse

import yaml
from processes import Logitd, Process, load, program
from tools import ROOT, certificate, free_ports, http, python_with, run, wait_for

PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARD = ROOT / "deploy/grafana/dashboards/logitd.json"
RULES = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"][0]["rules"]
GPU_PANEL = "GPU"  # no data without a GPU


@dataclasses.dataclass
class Case:
    """Series, one value a minute as promtool writes them, at which the alert must fire, and at which it must not."""

    fire: dict
    quiet: dict
    at: str
    labels: dict
    summary: str


HERE = {"instance": "a"}
JOB = {**HERE, "job": "logitd"}
CASES = {
    "LogitdDown": Case(
        {'up{job="logitd",instance="a"}': "0x10"},
        {'up{job="logitd",instance="a"}': "1x10"},
        "2m", JOB, "a does not answer"),
    "LogitdGone": Case(
        {'up{job="other",instance="a"}': "1x10"},
        {'up{job="logitd",instance="a"}': "0x10"},
        "4m", {"job": "logitd"}, "Prometheus finds no logitd"),
    "LogitdRestarts": Case(
        {'process_start_time_seconds{job="logitd",instance="a"}': "1 2 3 4 4x10"},
        {'process_start_time_seconds{job="logitd",instance="a"}': "1 2 3 3 3x10"},
        "10m", JOB, "a started 3 times in 15 minutes"),
    "LogitdDeviceError": Case(
        {'logitd_device_errors_total{kind="batch",instance="a"}': "0x3 1x6"},
        {'logitd_device_errors_total{kind="batch",instance="a"}': "1x10"},
        "8m", {**HERE, "kind": "batch"}, "a had a device error (batch)"),
    "LogitdCallsFail": Case(  # 10 of 100 a minute; quiet: 4 of 154, and the cancelled are no failures
        {'logitd_requests_total{code="OK",op="sample",instance="a"}': "0+90x20",
         'logitd_requests_total{code="INTERNAL",op="sample",instance="a"}': "0+10x20"},
        {'logitd_requests_total{code="OK",op="sample",instance="a"}': "0+100x20",
         'logitd_requests_total{code="CANCELLED",op="sample",instance="a"}': "0+50x20",
         'logitd_requests_total{code="INTERNAL",op="sample",instance="a"}': "0+4x20"},
        "15m", HERE, "a: 10% of the calls fail"),
    "LogitdSlow": Case(  # half of the calls take 1 to 2 s: the p99 is 49/50 of the way
        {'logitd_request_seconds_bucket{le="1",op="sample",instance="a"}': "0+50x30",
         'logitd_request_seconds_bucket{le="2",op="sample",instance="a"}': "0+100x30",
         'logitd_request_seconds_bucket{le="+Inf",op="sample",instance="a"}': "0+100x30"},
        {'logitd_request_seconds_bucket{le="1",op="sample",instance="a"}': "0+100x30",
         'logitd_request_seconds_bucket{le="2",op="sample",instance="a"}': "0+100x30",
         'logitd_request_seconds_bucket{le="+Inf",op="sample",instance="a"}': "0+100x30"},
        "25m", {**HERE, "op": "sample"}, "a: the p99 of sample is 1.98s"),
    "LogitdOverloaded": Case(  # of all identities: 2 + 1 a second
        {'logitd_refused_total{reason="hopeless",identity="token",instance="a"}': "0+120x20",
         'logitd_refused_total{reason="line_full",identity="none",instance="a"}': "0+60x20"},
        {'logitd_refused_total{reason="hopeless",identity="token",instance="a"}': "0+30x20",
         'logitd_refused_total{reason="invalid",identity="token",instance="a"}': "0+600x20"},
        "15m", HERE, "a refuses 3 calls a second that it cannot do in time"),
    "LogitdUnauthenticated": Case(
        {'logitd_refused_total{reason="unauthenticated",identity="none",instance="a"}': "0+120x20"},
        {'logitd_refused_total{reason="unauthenticated",identity="none",instance="a"}': "0+6x20"},
        "15m", HERE, "a refuses 2 calls a second for who calls"),
    "LogitdBrokenClient": Case(
        {'logitd_refused_total{reason="invalid",identity="none",instance="a"}': "0+60x20",
         'logitd_refused_total{reason="too_large",identity="user",instance="a"}': "0+60x20"},
        {'logitd_refused_total{reason="hopeless",identity="none",instance="a"}': "0+600x20"},
        "15m", HERE, "a gets 2 wrong requests a second"),
    "LogitdMemoryFull": Case(
        {'logitd_held_bytes{instance="a"}': "75x15", 'logitd_held_bytes_limit{instance="a"}': "100x15",
         'logitd_waiting_calls{instance="a"}': "3 0 " * 8},  # large calls: some wait at every other scrape
        {'logitd_held_bytes{instance="a"}': "95x15", 'logitd_held_bytes_limit{instance="a"}': "100x15",
         'logitd_waiting_calls{instance="a"}': "0x15",  # full, but nobody waits
         'logitd_held_bytes{instance="b"}': "12x15", 'logitd_held_bytes_limit{instance="b"}': "100x15",
         'logitd_waiting_calls{instance="b"}': "8x15"},  # they wait for their turn
        "14m", HERE, "a: calls wait, 75% of the memory for messages is held"),
    "LogitdSaturated": Case(  # 117 of 120 seconds that two streams have in a minute
        {'logitd_stream_busy_seconds_total{op="sample",instance="a"}': "0+58x40",
         'logitd_stream_busy_seconds_total{op="verify",instance="a"}': "0+59x40",
         'logitd_slabs{instance="a"}': "4x40"},
        {'logitd_stream_busy_seconds_total{op="sample",instance="a"}': "0+58x40",
         'logitd_slabs{instance="a"}': "4x40"},
        "30m", HERE, "a: its streams are busy 97.5% of the time"),
    "LogitdPeersSlow": Case(
        {'logitd_slabs_kept{instance="a"}': "2x10", 'logitd_slabs{instance="a"}': "4x10"},
        {'logitd_slabs_kept{instance="a"}': "1x10", 'logitd_slabs{instance="a"}': "4x10"},
        "8m", HERE, "a: 2 slabs wait for peers to take their answers"),
    "LogitdConnectionsCut": Case(
        {'logitd_connections_cut_total{reason="resets",instance="a"}': "0x3 1x8"},
        {'logitd_connections_cut_total{reason="resets",instance="a"}': "7x12"},
        "8m", {**HERE, "reason": "resets"}, "a cut connections: resets"),
    "LogitdConnectionsRefused": Case(
        {'logitd_connections_refused_total{instance="a"}': "0x4 10x8"},
        {'logitd_connections_refused_total{instance="a"}': "10x12"},
        "10m", HERE, "a refused 10 connections in 10 minutes"),
    "LogitdCertificateExpires": Case(  # time() is 0 at the start: two days less 5 minutes are left
        {'logitd_tls_certificate_expiry_seconds{instance="a"}': "172800x10"},
        {'logitd_tls_certificate_expiry_seconds{instance="a"}': "700000x10"},
        "5m", HERE, "a: its certificate expires in 1d 23h 55m 0s"),
    "LogitdFileStale": Case(
        {'logitd_file_stale{file="tls",instance="a"}': "1x5"},
        {'logitd_file_stale{file="tls",instance="a"}': "0x5"},
        "3m", {**HERE, "file": "tls"}, "a cannot use its new file: tls"),
    "LogitdDrainHangs": Case(
        {'logitd_draining{instance="a"}': "1x6"},
        {'logitd_draining{instance="a"}': "1 1 0 0 0 0 0"},
        "5m", HERE, "a has been draining for 3 minutes"),
    "LogitdDeviceLost": Case(
        {'logitd_device_up{device="0",instance="a"}': "1x6", 'logitd_device_up{device="1",instance="a"}': "1 1 0 0 0 0 0"},
        {'logitd_device_up{device="0",instance="a"}': "1x6", 'logitd_device_up{device="1",instance="a"}': "1x6"},
        "3m", {**HERE, "device": "1"}, "a has lost its device 1"),
}  # fmt: skip


class RulesTest(unittest.TestCase):
    def test_promtool_accepts_configuration_and_rules(self):
        run(program("promtool"), "check", "config", PROMETHEUS / "prometheus.yml")

    def test_every_alert_fires_when_it_should_and_only_then(self):
        promtool = program("promtool")
        self.assertEqual(set(CASES), {rule["alert"] for rule in RULES})
        tests = []
        for rule in RULES:
            case = CASES[rule["alert"]]
            annotations = {"summary": case.summary, "action": rule["annotations"]["action"]}
            alert = {"exp_labels": {**case.labels, **rule["labels"]}, "exp_annotations": annotations}
            for series, expected in ((case.fire, [alert]), (case.quiet, [])):
                asked = {"eval_time": case.at, "alertname": rule["alert"], "exp_alerts": expected}
                tests.append(
                    {
                        "interval": "1m",
                        "input_series": [{"series": name, "values": values} for name, values in series.items()],
                        "alert_rule_test": [asked],
                    }
                )
        with tempfile.TemporaryDirectory() as place:
            file = pathlib.Path(place, "test.yml")
            document = {"rule_files": [str(PROMETHEUS / "rules.yml")], "evaluation_interval": "1m", "tests": tests}
            file.write_text(yaml.safe_dump(document))
            run(promtool, "test", "rules", file)

    def test_alerts_and_dashboard_name_only_metrics_of_the_server(self):
        with tempfile.TemporaryDirectory() as place:
            certificate(place, "localhost")
            server = Logitd(place, "a", f"--tls-cert={place}/tls.crt", f"--tls-key={place}/tls.key")
            self.addCleanup(server.stop)
            page = http(f"http://{server.metrics}/metrics")
            known = set(re.findall(r"^(\w+)", page, re.MULTILINE)) | {"up"}
            server.stop()
        gpu = {m for m in re.findall(r"`(logitd_\w+)[`{]", (ROOT / "docs/operations.md").read_text()) if "_device_" in m}
        for expression in [rule["expr"] for rule in RULES] + [e for _, e in expressions()]:
            used = set(re.findall(r"\b(?:logitd|process)_\w+", expression))
            self.assertLessEqual(used, known | gpu, expression)


def expressions():
    """(panel's title, query) of the dashboard."""
    return [
        (panel["title"], target["expr"])
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel["targets"]
    ]


class DashboardTest(unittest.TestCase):
    def test_grafana_knows_every_field(self):
        python = python_with("grafana-foundation-sdk")
        self.assertEqual(run(python, "-c", GRAFANA_MODEL, DASHBOARD).strip(), "same")
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(DASHBOARD.read_text().replace('"legendFormat"', '"legend"'))
            file.flush()
            self.assertIn("legend", run(python, "-c", GRAFANA_MODEL, file.name))

    def test_provisioning_and_compose_fit_together(self):
        source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
        uids = set(re.findall(r'"type": "prometheus", "uid": "(\w+)"', DASHBOARD.read_text()))
        self.assertEqual(uids, {source["datasources"][0]["uid"]})
        compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
        provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/logitd.yml").read_text())
        mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
        self.assertEqual(mounts["./grafana/dashboards"], provider["providers"][0]["options"]["path"])
        for service in compose.values():
            for volume in service.get("volumes", []):
                self.assertTrue((ROOT / "deploy" / volume.split(":")[0]).is_dir(), volume)
        self.assertIn("prometheus", compose)
        self.assertEqual(urllib.parse.urlsplit(source["datasources"][0]["url"]).netloc, "prometheus:9090")


# Grafana's own SDK reads the dashboard and writes it again: a field that it does not know is gone then.
GRAFANA_MODEL = """
import json, sys
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
def lost(was, now, at=""):
    if isinstance(was, dict):
        return [x for k in was for x in (lost(was[k], now[k], f"{at}.{k}") if k in now else [f"{at}.{k}"])]
    if isinstance(was, list):
        return [x for i, each in enumerate(was) for x in lost(each, now[i], f"{at}[{i}]")]
    return [] if was == now else [at]
plugins.register_default_plugins()
was = json.load(open(sys.argv[1]))
now = json.loads(JSONEncoder().encode(Dashboard.from_json(was)))
print(lost(was, now) or "same")
"""


class ScrapeTest(unittest.TestCase):
    """Two servers under load, scraped by Prometheus with deploy/prometheus."""

    @classmethod
    def setUpClass(cls):
        prometheus = program("prometheus")
        cls.place = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.place)
        certificate(cls.place, "localhost", "127.0.0.1")
        cls.servers = [
            Logitd(
                cls.place,
                name,
                f"--tls-cert={cls.place}/tls.crt",
                f"--tls-key={cls.place}/tls.key",
                f"--head=demo={ROOT}/demo/model/model.safetensors",
            )
            for name in ("a", "b")
        ]
        for server in cls.servers:
            cls.addClassCleanup(server.stop)
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (job,) = config["scrape_configs"]
        del job["dns_sd_configs"]  # names of compose
        job["static_configs"] = [  # with the labels that the Prometheus Operator adds
            {"targets": [s.metrics], "labels": {"namespace": "logitd", "pod": f"logitd-{i}"}}
            for i, s in enumerate(cls.servers)
        ]
        shutil.copy(PROMETHEUS / "rules.yml", cls.place)
        pathlib.Path(cls.place, "prometheus.yml").write_text(yaml.safe_dump(config))
        (port,) = free_ports(1)
        cls.base = f"http://127.0.0.1:{port}"
        cls.prometheus = Process(
            cls.place,
            "prometheus",
            prometheus,
            f"--config.file={cls.place}/prometheus.yml",
            f"--storage.tsdb.path={cls.place}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        )
        cls.addClassCleanup(cls.prometheus.stop)
        cls.prometheus.wait_for("ready", lambda: http(f"{cls.base}/-/ready"))

    def query(self, expression):
        text = http(f"{self.base}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        try:
            answer = json.loads(text)
        except (TypeError, ValueError):
            self.fail(f"{expression}: {text}")
        self.assertEqual(answer["status"], "success", expression)
        return answer["data"]["result"]

    def numbers(self, expression):
        """The finite values of a query."""
        return [v for v in (float(series["value"][1]) for series in self.query(expression)) if math.isfinite(v)]

    def test_every_query_has_data_under_load(self):
        loads = []
        for i, server in enumerate(self.servers):
            loads.append(
                load(
                    self.place,
                    server.address,
                    *("--tls-ca", f"{self.place}/tls.crt", "--head", "demo", "--rows", "4", "--vocab", "50257"),
                    *("--mix", "topk=2,sample=2,score=1,hidden_sample=1", "--connections", "2", "--duration", "300"),
                    name=f"load{i}",
                )
            )
            self.addCleanup(loads[-1].stop)
        plot = dashboard_plot()
        for title, expression in expressions():
            if title == GPU_PANEL:
                self.query(expression)
                continue
            with self.subTest(title, expression=expression):
                self.wait_for_data(plot.fill_in(expression, 10), loads)
        self.assertEqual(self.numbers('sum(up{job="logitd"})'), [2.0])
        for rule in yaml.safe_load((ROOT / "deploy/kubernetes/adapter-rules.yaml").read_text())["rules"]:
            series = rule["seriesQuery"].split("{")[0]
            asked = rule["metricsQuery"].replace("<<.Series>>", series).replace("<<.GroupBy>>", "pod")
            pods = 'namespace="logitd",pod=~"logitd-0|logitd-1"'
            asked = asked.replace("<<.LabelMatchers>>", pods).replace("2m", "10s")
            wait_for(f"a value for each pod: {asked}", lambda asked=asked: len(self.numbers(asked)) == 2)
            self.assertTrue(self.query(rule["seriesQuery"]))

        picture = pathlib.Path(self.place, "dashboard.png")
        titles = plot.draw(self.base, minutes=0.5, step=1, interval=10, out=picture)
        self.assertEqual(set(titles) | {GPU_PANEL}, {title for title, _ in expressions()} | {GPU_PANEL})
        self.assertGreater(picture.stat().st_size, 10000)
        for each in loads:
            self.assertIsNone(each.process.poll(), each.log)  # there was load all the time

    def wait_for_data(self, expression, loads):
        for each in loads:
            self.assertIsNone(each.process.poll(), each.log)
        wait_for(f"data of {expression}", lambda: self.numbers(expression), limit=20)

    def test_every_alert_is_evaluated(self):
        def evaluated():
            groups = json.loads(http(f"{self.base}/api/v1/rules"))["data"]["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            return rules if rules and all(rule["health"] != "unknown" for rule in rules) else None

        rules = wait_for("rules are evaluated", evaluated)
        self.assertEqual({rule["name"] for rule in rules}, {rule["alert"] for rule in RULES})
        for rule in rules:
            self.assertEqual((rule["health"], rule.get("lastError", "")), ("ok", ""), rule["name"])
            self.query(rule["query"])

    def test_zz_a_server_that_ended_is_an_alert(self):  # the last test: one server is gone after it
        server = self.servers[1]
        self.assertEqual(server.stop(), 0)

        def pending():
            alerts = json.loads(http(f"{self.base}/api/v1/alerts"))["data"]["alerts"]
            return [a for a in alerts if a["labels"]["alertname"] == "LogitdDown"]

        (alert,) = wait_for("LogitdDown", pending)
        self.assertEqual(alert["labels"]["instance"], server.metrics)


def dashboard_plot():
    """scripts/plot_dashboard, as a module."""
    loader = importlib.machinery.SourceFileLoader("plot_dashboard", str(ROOT / "scripts/plot_dashboard"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
