"""The files of examples/deploy parse, fit each other, and name things that exist."""

import argparse
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from deployed import (
    DEPLOY,
    MANIFESTS,
    REPLICAS,
    ROOT,
    load,
    mounts,
    objects,
    on_disk,
    one,
    panels,
    queries,
    rules,
    value,
    variables,
    words,
)
from kvpolicy.dsl.check.policy import load as load_policy
from kvpolicy.experiments.definition import reading

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not on PATH: it comes with Debian's package `prometheus`",
)
KUBERNETES = "1.33"  # the oldest version that is still looked after

# Every name that the server exports, as Prometheus stores it.
EXPORTED = """
import sys
from prometheus_client import REGISTRY
from kvpolicy.experiments.definition import reading
from kvpolicy.sglang_ext.experiment.series import Series
from kvpolicy.sglang_ext.report.metrics import Metrics
before = {family.name for family in REGISTRY.collect()}
Metrics({"model_name": "m"}, ["lava"])
Series(reading.read(open(sys.argv[1]).read(), sys.argv[1]).require()).export({"model_name": "m"})
parts = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
for family in REGISTRY.collect():
    for part in parts[family.type] if family.name not in before else ():
        print(family.name + part)
"""


def promtool(*arguments):
    done = subprocess.run(["promtool", *arguments], cwd=DEPLOY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "rules.yaml")],
    ids=lambda arguments: arguments[1],
)
def test_prometheus_reads_it(arguments):
    promtool(*arguments)


@needs_promtool
def test_alerts_fire_and_do_not_fire():
    promtool("test", "rules", "rules_test.yaml")


def test_each_alert_is_tested_both_ways():
    checks = [c for test in load("rules_test.yaml")["tests"] for c in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules("alert")}
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == names
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == names


def test_alerts_say_what_is_wrong_and_what_to_do():
    for rule in rules("alert"):
        assert re.fullmatch(r"KV[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert {"summary", "description"} == set(rule["annotations"])


def test_every_recorded_series_is_used():
    used = " ".join(rule["expr"] for rule in rules("alert"))
    for rule in rules("record"):
        assert rule["record"] in used


@pytest.fixture(scope="module")
def exported():
    """Names of all series of kvpolicy."""
    command = [sys.executable, "-P", "-c", EXPORTED, "examples/deploy/experiment/experiment.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    server = (ROOT / "sglang_ext" / "clients" / "front_end.py").read_text()
    return {*done.stdout.split(), *re.findall(r'"(sglang:kv_\w+)"', server)}


def test_queries_name_series_that_are_exported(exported):
    asked = [query for _, query in queries()]
    asked += [rule["expr"] for kind in ("alert", "record") for rule in rules(kind)]
    asked += [v["definition"] for v in variables().values() if "definition" in v]
    named = set(re.findall(r"sglang:kv_(?:policy|experiment)_\w+", " ".join(asked)))
    assert len(named) > 20
    assert named <= exported


def test_the_dashboard_can_be_imported_anywhere():
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    assert variables()["DS_PROMETHEUS"]["type"] == "datasource"
    for panel in panels():
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
            known = {"__rate_interval", *variables()}
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= known


def test_the_panels_do_not_overlap():
    taken = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_latency_is_labelled_as_not_causal():
    asked = [p for p in panels() if any("_seconds_bucket" in t["expr"] and "kv_arm" in t["expr"]
                                        for t in p.get("targets", ()))]  # fmt: skip
    assert len(asked) == 3
    assert all("NOT CAUSAL" in panel["description"] for panel in asked)


def compose_command(name):
    return words(load("compose.yaml")["services"][name]["command"])


def kubernetes_command(kind, name):
    [container] = one(kind, name)["spec"]["template"]["spec"]["containers"]
    return words(container["args"])


def test_compose_and_kubernetes_start_the_same():
    server = kubernetes_command("StatefulSet", "server")
    assert server == compose_command("server-0") == compose_command("server-1")
    assert kubernetes_command("Deployment", "gateway") == compose_command("gateway")
    prometheus = kubernetes_command("StatefulSet", "prometheus")
    assert prometheus == compose_command("prometheus")
    assert "--enable-feature=auto-reload-config" in prometheus  # else rules are read at the start
    images = {each["image"] for each in load("compose.yaml")["services"].values()}
    workloads = objects("StatefulSet") + objects("Deployment")
    assert images == {
        container["image"]
        for each in workloads
        for container in each["spec"]["template"]["spec"]["containers"]
    }


def test_the_server_knows_every_option():
    pytest.importorskip("sglang", reason="SGLang is an extra")
    from kvpolicy.sglang_ext.face import options
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    if "--kv-policy" not in parser.format_usage():  # SGLang's plugins are not loaded here
        options.add_arguments(parser)
    parsed = parser.parse_args(compose_command("server-0"))
    assert (parsed.port, parsed.enable_metrics) == (30000, True)
    assert (parsed.api_key, parsed.admin_api_key) == ("SGLANG_API_KEY", "SGLANG_ADMIN_KEY")
    assert parsed.kv_policy_override in options.OVERRIDES


def test_the_gateway_knows_every_option():
    router_args = pytest.importorskip("smg.router_args", reason="smg is not installed")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    router_args.RouterArgs.add_cli_args(parser, use_router_prefix=False)
    parsed = parser.parse_args(compose_command("gateway"))
    assert (parsed.port, parsed.prometheus_port) == (30000, 29000)
    assert len(parsed.worker_urls) == 2


def test_the_gateway_has_the_version_that_is_tested():
    [pinned] = re.findall(r"smg==[\d.]+", (DEPLOY / "gateway.Dockerfile").read_text())
    requirements = ROOT / "tests" / "environment" / "requirements-dev.txt"
    assert pinned in requirements.read_text().split()


def test_replicas_have_the_names_that_others_use():
    services = load("compose.yaml")["services"]
    names = {
        alias for name in REPLICAS for alias in services[name]["networks"]["default"]["aliases"]
    }
    server = one("StatefulSet", "server")
    assert one("Service", server["spec"]["serviceName"])["spec"]["clusterIP"] == "None"
    assert names == {f"server-{i}.server" for i in range(server["spec"]["replicas"])}
    addresses = {f"{name}:30000" for name in names}
    urls = compose_command("gateway")
    assert {url.removeprefix("http://") for url in urls if "://" in url} == addresses
    jobs = {job["job_name"]: job for job in load("prometheus.yml")["scrape_configs"]}
    [static] = jobs["sglang"]["static_configs"]
    assert set(static["targets"]) == addresses
    assert jobs["smg"]["static_configs"] == [{"targets": ["gateway:29000"]}]


def test_what_servers_read_is_mounted_as_folders():
    services = load("compose.yaml")["services"]
    states = set()
    for name in REPLICAS:
        command = compose_command(name)
        policy = on_disk(value(command, "kv-policy"), services[name])
        assert load_policy(policy).program is not None
        experiment = on_disk(value(command, "kv-experiment"), services[name])
        found = reading.read(experiment.read_text(), str(experiment))
        found.require()
        assert not reading.check_policies(found, [policy.stem, "none"])
        folder = value(command, "kv-experiment-state").rpartition("/")[0]
        states.add(mounts(services[name])[folder])
        assert all((DEPLOY / outside).is_dir() for outside in mounts(services[name]).values()
                   if outside.startswith("."))  # fmt: skip
    assert states == set(load("compose.yaml")["volumes"]) - {"weights", "prometheus", "grafana"}


def test_other_services_mount_what_is_there():
    services = load("compose.yaml")["services"]
    for name in ("prometheus", "grafana"):
        for outside in mounts(services[name]).values():
            assert not outside.startswith(".") or (DEPLOY / outside).exists()
    for service in services.values():
        if "build" in service:
            context = DEPLOY / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()
    [provider] = load("grafana/provisioning/dashboards/kvpolicy.yaml")["providers"]
    assert f"{provider['options']['path']}/dashboard.json" in mounts(services["grafana"])
    [source] = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    interval = load("prometheus.yml")["global"]["scrape_interval"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == interval


def test_only_the_gateway_is_open_to_others():
    for name, service in load("compose.yaml")["services"].items():
        for port in service.get("ports", ()):
            assert name == "gateway" or port.startswith("127.0.0.1:")
    text = (DEPLOY / "compose.yaml").read_text()
    assert re.findall(r"--(?:admin-)?api-key=(?!\$)", text) == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_accepts_the_manifests(path):
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for manifest in yaml.safe_load_all(path.read_text()):
        if manifest["kind"] == "PodMonitor":  # the operator's; its schema is not Kubernetes'
            assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
        else:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_manifests_refer_to_what_there_is():
    customized = load("kustomization.yaml")
    resources = {DEPLOY / name for name in customized["resources"]}
    assert resources == set(MANIFESTS) - {DEPLOY / "kubernetes" / "podmonitor.yaml"}
    # With a hash in its name a new version would be another ConfigMap: every pod would restart.
    assert customized["generatorOptions"]["disableNameSuffixHash"] is True
    maps = {each["metadata"]["name"] for each in objects("ConfigMap")}
    for generated in customized["configMapGenerator"]:
        maps.add(generated["name"])
        assert all((DEPLOY / file).is_file() for file in generated["files"])
    used = set()
    for workload in objects("StatefulSet") + objects("Deployment"):
        template = workload["spec"]["template"]
        pod = template["spec"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= (
            template["metadata"]["labels"].items()
        )
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get(
            "volumeClaimTemplates", ())}  # fmt: skip
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        used |= {v["configMap"]["name"] for v in pod.get("volumes", ()) if "configMap" in v}
        for container in pod["containers"]:
            for mount in container.get("volumeMounts", ()):
                assert mount["name"] in volumes | claims
                assert "subPath" not in mount  # it would never see a new version
    assert used == maps


def test_monitors_select_pods_and_ports():
    for monitor in objects("PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        [template] = [
            each["spec"]["template"]
            for each in objects("StatefulSet") + objects("Deployment")
            if wanted <= each["spec"]["template"]["metadata"]["labels"].items()
        ]
        [container] = template["spec"]["containers"]
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        annotations = template["metadata"]["annotations"]
        assert str(ports[endpoint["port"]]) == annotations["prometheus.io/port"]
        assert endpoint["path"] == annotations["prometheus.io/path"]


def test_policies_are_those_that_are_shipped():
    for name, text in one("ConfigMap", "policies")["data"].items():
        assert text == (ROOT / "policies" / name).read_text()


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", (DEPLOY / "README.md").read_text()):
        assert (DEPLOY / target).exists(), target


def test_commands_of_the_readme_make_the_keys_that_are_used():
    readme = (DEPLOY / "README.md").read_text()
    for name in re.findall(r"\$\{(\w+):\?", (DEPLOY / "compose.yaml").read_text()):
        assert f"{name}=" in readme
    for workload in objects("StatefulSet") + objects("Deployment"):
        for container in workload["spec"]["template"]["spec"]["containers"]:
            from_secrets = [x for x in container.get("env", ()) if "value" not in x]
            for variable in from_secrets:
                reference = variable["valueFrom"]["secretKeyRef"]
                assert f"secret generic {reference['name']} " in readme
                assert f"--from-literal={reference['key']}=" in readme


@pytest.mark.thorough
def test_the_image_gets_the_whole_package(tmp_path):
    """Files that `server.Dockerfile.dockerignore` lets through make the same wheel."""
    lines = (DEPLOY / "server.Dockerfile.dockerignore").read_text().splitlines()
    for name in [line[1:] for line in lines if line.startswith("!")]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        options = {"symlinks": True} if copy is shutil.copytree else {}
        copy(ROOT / name, tmp_path / name, **options)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", tmp_path, tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = subprocess.check_output([sys.executable, "-m", "zipfile", "-l", wheel], text=True)
    for name in ("policies/lava.yaml", "sglang_ext/plugin.py", "experiments/commands.py"):
        assert f"kvpolicy/{name}" in names
