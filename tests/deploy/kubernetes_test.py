"""deploy/kubernetes: kustomize builds it, the API's schemas allow it, and its container's command line serves."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import unittest

import yaml
from processes import stated_memory
from tools import ROOT, certificate, kustomize, python_with, run, wait_for

KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ("cpu", "gpu")
# The oldest with what we use (a preStop of the kubelet's own), and the newest that the validator knows.
OLDEST = "1.30"
HANG_SECONDS = 5  # docs/operations.md: a slice that hangs ends the process after the drain's grace and these
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

# Unknown fields vanish in the models: what comes out differs from what went in.
MODEL_CHECK = """
import sys, yaml
import cloudcoil.models.prometheus_operator.v1 as models
for document in yaml.safe_load_all(sys.stdin):
    model = getattr(models, document["kind"]).model_validate(document)
    back = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if back != document:
        sys.exit(f"{document['kind']}: got {document}, the schema knows {back}")
    print(document["kind"])
"""


def build(path):
    return list(yaml.safe_load_all(run(kustomize(), "build", path)))


def size(text):
    number, unit = re.fullmatch(r"(\d+)(\w*)", str(text)).groups()
    return int(number) * UNITS[unit]


def named(documents, kind):
    (found,) = (d for d in documents if d["kind"] == kind)
    return found


def matches(selector, labels):
    return bool(selector) and selector.items() <= labels.items()


class KubernetesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.built = {overlay: build(KUBERNETES / "overlays" / overlay) for overlay in OVERLAYS}

    def container(self, overlay):
        (container,) = named(self.built[overlay], "Deployment")["spec"]["template"]["spec"]["containers"]
        return container

    def validate(self, text, version):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            validator = python_with("kubernetes-validate").parent / "kubernetes-validate"
            return subprocess.run(
                [validator, "--strict", *(["-k", version] if version else []), file.name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )

    def test_schemas_of_the_api_allow_every_object(self):
        for overlay in OVERLAYS:
            objects = [d for d in self.built[overlay] if d["kind"] != "ServiceMonitor"]  # no part of the API
            for version in (OLDEST, None):
                with self.subTest(overlay, version=version):
                    done = self.validate(yaml.safe_dump_all(objects), version)
                    self.assertEqual(done.returncode, 0, done.stdout)
                    self.assertEqual(done.stdout.count(" passed for resource "), len(objects), done.stdout)

    def test_a_misspelt_field_is_found(self):
        deployment = json.loads(json.dumps(named(self.built["cpu"], "Deployment")))
        deployment["spec"]["template"]["spec"]["terminationGraceSeconds"] = 40
        done = self.validate(yaml.safe_dump(deployment), OLDEST)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("terminationGraceSeconds", done.stdout)

    def test_schemas_of_the_prometheus_operator_allow_its_objects(self):
        python = python_with("cloudcoil-models-prometheus-operator", "PyYAML")
        for text in (
            yaml.safe_dump(named(self.built["cpu"], "ServiceMonitor")),
            run(KUBERNETES / "prometheus-rule"),
        ):
            run(python, "-c", MODEL_CHECK, input=text)
        wrong = yaml.safe_dump(named(self.built["cpu"], "ServiceMonitor")).replace("interval:", "intervall:")
        with self.assertRaises(AssertionError):
            run(python, "-c", MODEL_CHECK, input=wrong)

    def test_selectors_choose_the_pods(self):
        for overlay in OVERLAYS:
            documents = self.built[overlay]
            pod = named(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
            service = named(documents, "Service")
            policy = named(documents, "NetworkPolicy")["spec"]
            self.assertTrue(matches(named(documents, "Deployment")["spec"]["selector"]["matchLabels"], pod))
            self.assertTrue(matches(service["spec"]["selector"], pod))
            self.assertTrue(matches(named(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"], pod))
            self.assertTrue(matches(policy["podSelector"]["matchLabels"], pod))
            monitor = named(documents, "ServiceMonitor")["spec"]
            self.assertTrue(matches(monitor["selector"]["matchLabels"], service["metadata"]["labels"]))
            self.assertEqual(service["spec"]["clusterIP"], "None")
            ports = {port["name"] for port in self.container(overlay)["ports"]}
            for used in (
                [p["targetPort"] for p in service["spec"]["ports"]],
                [p["port"] for rule in policy["ingress"] for p in rule["ports"]],
            ):
                self.assertEqual(set(used), ports)
            self.assertLessEqual(
                {e["port"] for e in monitor["endpoints"]}, {p["name"] for p in service["spec"]["ports"]}
            )
            callers = [s["podSelector"]["matchLabels"] for s in policy["ingress"][0]["from"]]
            self.assertEqual(callers, [{"logitd-client": "true"}] * 2)  # and not logitd's own label
            target = named(documents, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
            self.assertEqual((target["kind"], target["name"]), ("Deployment", "logitd"))

    def test_the_autoscaler_and_the_adapter_name_the_same_metrics(self):
        metrics = named(self.built["cpu"], "HorizontalPodAutoscaler")["spec"]["metrics"]
        rules = yaml.safe_load((KUBERNETES / "adapter-rules.yaml").read_text())["rules"]
        self.assertEqual([m["pods"]["metric"]["name"] for m in metrics], [r["name"]["as"] for r in rules])

    def test_gpus(self):
        gpu = {"nvidia.com/gpu": 1}
        self.assertLessEqual(gpu.items(), self.container("gpu")["resources"]["limits"].items())
        self.assertNotIn("nvidia.com/gpu", self.container("cpu")["resources"]["limits"])
        rolling = named(self.built["gpu"], "Deployment")["spec"]["strategy"]["rollingUpdate"]
        self.assertEqual(rolling, {"maxSurge": 0, "maxUnavailable": 1})  # needs no free GPU

    def test_pods_meet_the_restricted_standard(self):
        for overlay in OVERLAYS:
            spec = named(self.built[overlay], "Deployment")["spec"]["template"]["spec"]
            container = self.container(overlay)["securityContext"]
            self.assertTrue(spec["securityContext"]["runAsNonRoot"])
            self.assertEqual(spec["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
            self.assertFalse(spec["automountServiceAccountToken"])
            self.assertFalse(container["allowPrivilegeEscalation"])
            self.assertTrue(container["readOnlyRootFilesystem"])
            self.assertEqual(container["capabilities"], {"drop": ["ALL"]})
            namespace = named(self.built[overlay], "Namespace")["metadata"]["labels"]
            self.assertEqual(namespace["pod-security.kubernetes.io/enforce"], "restricted")

    def test_grace_is_longer_than_the_drain(self):
        for overlay in OVERLAYS:
            spec = named(self.built[overlay], "Deployment")["spec"]["template"]["spec"]
            sleep = self.container(overlay)["lifecycle"]["preStop"]["sleep"]["seconds"]
            drain = int(named(self.built[overlay], "ConfigMap")["data"]["LOGITD_DRAIN_GRACE"].rstrip("s"))
            self.assertGreater(spec["terminationGracePeriodSeconds"], sleep + drain + HANG_SECONDS)

    def check_memory(self, overlay, log):
        """The container has the sum that the server states."""
        resources = self.container(overlay)["resources"]
        self.assertEqual(resources["limits"]["memory"], resources["requests"]["memory"])  # the sum is really used
        memory = stated_memory(log)
        need, heads = memory["sum"], memory["heads"]
        limit = size(resources["limits"]["memory"]) >> 20
        flags = named(self.built[overlay], "ConfigMap")["data"]
        if flags["LOGITD_BACKEND"] == "cuda":  # here it ran on the CPU
            need -= heads + memory["their scratch"]
        elif "LOGITD_MAX_HEAD_BYTES" not in flags:  # by default, a share of what the process may use
            need += heads * limit / memory["usable"] - heads
        self.assertLessEqual(need, limit)

    def test_the_container_serves_with_the_secrets_and_has_the_memory(self):
        with tempfile.TemporaryDirectory() as scratch:
            place = pathlib.Path(scratch)
            secrets = place / "secrets"
            shutil.copytree(KUBERNETES / "secrets", secrets)
            certificate(secrets, "localhost", "127.0.0.1")
            token = "a-token-of-this-test-only"
            digest = hashlib.sha256(token.encode()).hexdigest()
            identity = {"name": "test", "roles": ["infer"], "token_sha256": [digest]}
            (secrets / "tokens.json").write_text(json.dumps({"identities": [identity]}))
            built = {d["metadata"]["name"]: d for d in build(secrets)}
            for overlay in OVERLAYS:
                with self.subTest(overlay):
                    self.serve(overlay, built, place, secrets / "tls.crt", token)

    def serve(self, overlay, secrets, place, authority, token):
        """Runs the container's command with its flags; volumes are folders of `place`."""
        spec = named(self.built[overlay], "Deployment")["spec"]["template"]["spec"]
        container = self.container(overlay)
        mounts = {}
        for volume in spec["volumes"]:
            path = place / overlay / volume["name"]
            path.mkdir(parents=True)
            if "secret" in volume:
                run("python3", "-c", UNPACK, path, input=json.dumps(secrets[volume["secret"]["secretName"]]["data"]))
            (mount,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == volume["name"])
            mounts[mount] = str(path)

        def here(text):
            for mount, path in mounts.items():
                text = text.replace(mount, path)
            return text.replace("0.0.0.0:7450", "127.0.0.1:0").replace("0.0.0.0:9464", "127.0.0.1:0")

        config = named(self.built[overlay], "ConfigMap")
        self.assertEqual(container["envFrom"], [{"configMapRef": {"name": config["metadata"]["name"]}}])
        flags = {name: here(value) for name, value in config["data"].items()}
        if flags["LOGITD_BACKEND"] == "cuda":  # this machine may have no GPU
            flags["LOGITD_BACKEND"] = "cpu"
        log = place / f"{overlay}.log"
        with open(log, "wb") as file:
            server = subprocess.Popen(
                [os.environ["LOGITD_BINARY"], *map(here, container["args"])],
                env={"PATH": os.environ["PATH"], **flags},
                stderr=file,
            )
        try:
            logitctl = os.environ["LOGITCTL_BINARY"]
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                program, *arguments = map(here, container[probe]["exec"]["command"])
                self.assertEqual(program, "logitctl")
                wait_for(
                    f"{probe}: {log.read_text()}",
                    lambda: subprocess.run([logitctl, *arguments], check=False, capture_output=True).returncode == 0
                    or server.poll() is not None,
                )
                self.assertIsNone(server.poll(), log.read_text())
            address = re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())[1]
            secret = place / "token"
            secret.write_text(token)
            info = run(logitctl, "info", "--addr", address, "--tls-ca", authority, "--token-file", secret)
            self.assertIn("CPU", info.upper())
            self.check_memory(overlay, log.read_text())
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(timeout=60)
        self.assertEqual(code, 0, log.read_text())


# The files of a secret as the kubelet writes them.
UNPACK = """
import base64, json, pathlib, sys
for name, data in json.load(sys.stdin).items():
    pathlib.Path(sys.argv[1], name).write_bytes(base64.b64decode(data))
"""
