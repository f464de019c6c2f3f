"""examples/kubernetes: what kustomize renders is valid Kubernetes, and agrees with the daemon and its tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support import CAPABILITIES, CHOWN, ROOT

import afxdpd

KUBERNETES = ROOT / "examples" / "kubernetes"
KUSTOMIZATIONS = ["base", *sorted(f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir())]
EXAMPLES = sorted(path for path in KUBERNETES.rglob("*.yaml") if not (path.parent / "kustomization.yaml").exists())
VERSIONS = ["1.30", kubernetes_validate.latest_version()]
"""The oldest is the first that knows appArmorProfile."""

pytestmark = pytest.mark.program

Object = dict[str, Any]
each_kustomization = pytest.mark.parametrize("name", KUSTOMIZATIONS)


@cache
def rendered(name: str, directory: Path = KUBERNETES) -> list[Object]:
    """The objects of base or overlay, as `kubectl apply -k` would send them."""
    beside = os.path.dirname(sys.executable)
    kubectl = shutil.which("kubectl", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    assert kubectl, "there is no kubectl: install the dev extra"
    output = subprocess.run([kubectl, "kustomize", str(directory / name)], capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr
    return objects(output.stdout)


def objects(text: str) -> list[Object]:
    """The objects in a YAML stream."""
    return [found for found in yaml.safe_load_all(text) if found is not None]


def one(name: str, kind: str) -> Object:
    """The only object of that kind in what is rendered."""
    (found,) = [candidate for candidate in rendered(name) if candidate["kind"] == kind]
    return found


def template(name: str) -> Object:
    """The specification of the daemon's pods."""
    spec: Object = one(name, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def container(name: str) -> Object:
    """The daemon's container, the only one."""
    (found,) = template(name)["containers"]
    assert "initContainers" not in template(name)
    assert isinstance(found, dict)
    return found


def arguments(name: str) -> dict[str, str]:
    """The daemon's command line: option → value."""
    return dict(argument.split("=", 1) for argument in container(name)["args"])


# -- Schemas -----------------------------------------------------------------------------------------------------------


@each_kustomization
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid_when_kustomize_has_rendered_them(name: str, version: str) -> None:
    """The oldest and the newest Kubernetes know each field, and its type."""
    assert {found["kind"] for found in rendered(name)} == {"Namespace", "ConfigMap", "DaemonSet"}
    for found in rendered(name):
        kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wrong_object_is_refused(version: str) -> None:
    """The validator knows what it validates: a misspelt field and a wrong type are found."""
    for wrong in ({"hostNetwrok": True}, {"hostNetwork": "yes"}):
        found = json.loads(json.dumps(one("base", "DaemonSet")))
        found["spec"]["template"]["spec"].update(wrong)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", VERSIONS)
def test_example_is_valid(path: Path, version: str) -> None:
    """Each object of each example; those of Multus, which bring no schema, are checked by the next tests."""
    found = objects(path.read_text())
    assert found
    for example in found:
        if example["apiVersion"] != "k8s.cni.cncf.io/v1":
            kubernetes_validate.validate(example, version, strict=True)


def test_examples_are_what_the_readme_lists() -> None:
    """Whoever looks for an example finds it there; and no file is outside the checks of this module."""
    readme = (KUBERNETES / "README.md").read_text()
    files = {path.relative_to(KUBERNETES).as_posix() for path in EXAMPLES}
    assert files == {"network-attachment-definition.yaml", "pods/cndp.yaml", "pods/dpdk.yaml", "pods/python.yaml"}
    for name in [*files, *KUSTOMIZATIONS]:
        assert f"]({name}" in readme, name


# -- The daemon's ------------------------------------------------------------------------------------------------------


@each_kustomization
def test_configuration_is_right_when_the_daemon_checks_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What is in the ConfigMap passes the daemon's own --check, without a warning."""
    (file_name, content), *others = one(name, "ConfigMap")["data"].items()
    assert not others
    file = tmp_path / file_name
    file.write_text(content)
    assert afxdpd.main(["--check", "--config", str(file)]) == 0
    config = afxdpd.get_plugin_config(file)
    assert config.pools
    output = capsys.readouterr().out
    for pool in config.pools:
        assert f"\nafxdp/{pool.name}: " in output
    assert "WARNING" not in output
    assert not caplog.records
    assert config.kind_cluster is (name == "overlays/kind")
    assert all(pool.bpf_map_pinning_enable for pool in config.pools) is (name == "overlays/pinned-map")
    assert all(pool.mode == "cdq" for pool in config.pools) is (name == "overlays/cdq")


@each_kustomization
def test_command_line_is_understood(name: str) -> None:
    """The daemon's own parser takes the arguments; they name the file of the ConfigMap, and the probes' address."""
    wanted = arguments(name)
    assert not {"command", "env"} & container(name).keys()  # the image's own
    options = afxdpd._parse_arguments(container(name)["args"])
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container(name)["volumeMounts"]}
    (file,) = one(name, "ConfigMap")["data"]
    assert options.config == mounts["config"] / file
    assert (options.kubelet_dir, options.uds_dir, options.bpffs) == (
        afxdpd.KUBELET_DIR,
        afxdpd.UDS_DIR,
        afxdpd.BPFFS,
    )
    (port,) = container(name)["ports"]
    assert wanted["--http"] == f"127.0.0.1:{port['containerPort']}"


@each_kustomization
def test_probes_ask_the_daemon_where_it_listens(name: str) -> None:
    """On the host's loopback, which kubelet shares; only whether it is alive decides whether it is restarted."""
    daemon = container(name)
    address = arguments(name)["--http"].rpartition(":")[0]
    paths = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    for probe, path in paths.items():
        assert daemon[probe]["httpGet"] == {"host": address, "port": daemon["ports"][0]["name"], "path": path}
    assert daemon["livenessProbe"]["failureThreshold"] * daemon["livenessProbe"]["periodSeconds"] >= 30


@each_kustomization
def test_capabilities_are_those_that_the_tests_prove(name: str) -> None:
    """All others are dropped; CHOWN is there where the pool gives files to a user, and nowhere else."""
    (content,) = one(name, "ConfigMap")["data"].values()
    gives_files_away = any(pool.get("uid") and pool.get("bpfMapPinningEnable") for pool in json.loads(content)["pools"])
    assert gives_files_away is (name == "overlays/pinned-map")
    proved = {**CAPABILITIES, **(CHOWN if gives_files_away else {})}
    capabilities = container(name)["securityContext"]["capabilities"]
    assert capabilities == {"drop": ["ALL"], "add": [capability.upper() for capability in proved]}


@each_kustomization
def test_container_can_do_nothing_else(name: str) -> None:
    """It is not privileged, cannot become so, writes to no file of its image and has no token."""
    context = container(name)["securityContext"]
    assert context["runAsUser"] == 0
    assert context["privileged"] is False
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    spec = template(name)
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"seccompProfile", "appArmorProfile"} & context.keys()
    assert spec["automountServiceAccountToken"] is False
    assert spec["priorityClassName"] == "system-node-critical"
    assert spec["hostNetwork"] is True
    assert not {"hostPID", "hostIPC", "serviceAccountName", "shareProcessNamespace"} & spec.keys()


@each_kustomization
def test_two_daemons_never_meet_when_the_pods_are_updated(name: str) -> None:
    """The old one has ended before the new one starts, on one node after the other."""
    strategy = one(name, "DaemonSet")["spec"]["updateStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert template(name)["terminationGracePeriodSeconds"] <= 30


@each_kustomization
def test_mounts_are_the_hosts_directories_at_the_daemons_defaults(name: str) -> None:
    """Each directory is at the same path on both sides, since kubelet is told of it; there is no other of the host."""
    wanted = {
        str(afxdpd.KUBELET_DIR / "device-plugins"): ("Directory", False),
        str(afxdpd.Paths().pod_resources_socket.parent): ("Directory", True),
        str(afxdpd.BPFFS): ("Directory", False),
        str(afxdpd.UDS_DIR): ("DirectoryOrCreate", False),
        str(afxdpd.LOG_DIR): ("DirectoryOrCreate", False),
    }
    volumes = {volume["name"]: volume for volume in template(name)["volumes"]}
    found = {}
    for mount in container(name)["volumeMounts"]:
        volume = volumes.pop(mount["name"])
        if "hostPath" in volume:
            assert volume["hostPath"]["path"] == mount["mountPath"]
            found[mount["mountPath"]] = volume["hostPath"]["type"], mount.get("readOnly", False)
        else:
            assert volume["configMap"] == {"name": one(name, "ConfigMap")["metadata"]["name"]}
            assert mount["readOnly"] is True
        assert "mountPropagation" not in mount
    assert found == wanted
    assert not volumes


def test_edited_configuration_is_another_config_map() -> None:
    """Its name depends on its content: an edited file rolls the daemons, where there is no shell to send a signal."""
    names = {name: one(name, "ConfigMap")["metadata"]["name"] for name in KUSTOMIZATIONS}
    assert len(set(names.values())) == len(names)


def test_overlay_of_ones_own_is_rendered_as_the_readme_says(tmp_path: Path) -> None:
    """The README's kustomization brings its image and its configuration into the DaemonSet."""
    tree = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, tree)
    own = tree / "overlays" / "own"
    own.mkdir()
    blocks = (KUBERNETES / "README.md").read_text().split("```")
    (content,) = [block.removeprefix("yaml\n") for block in blocks if block.startswith("yaml\n")]
    (own / "kustomization.yaml").write_text(content)
    (own / "config.json").write_text('{"pools": []}')
    found = {rendered_object["kind"]: rendered_object for rendered_object in rendered("overlays/own", tree)}
    assert found["ConfigMap"]["data"] == {"config.json": '{"pools": []}'}
    spec = found["DaemonSet"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == "registry.example.org/afxdpd:0.1.0"
    names = [volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume]
    assert names == [found["ConfigMap"]["metadata"]["name"]]


# -- Pods --------------------------------------------------------------------------------------------------------------


def network() -> Object:
    """The example's network definition."""
    (found,) = objects((KUBERNETES / "network-attachment-definition.yaml").read_text())
    return found


def test_network_is_for_the_pool_and_leaves_the_program_alone() -> None:
    """The CNI's part: the pool's resource, and the keys that it needs for this daemon."""
    definition = network()
    assert (definition["apiVersion"], definition["kind"]) == ("k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition")
    (pool,) = json.loads(one("base", "ConfigMap")["data"]["config.json"])["pools"]
    assert definition["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/resourceName": f"afxdp/{pool['name']}"}
    assert definition["spec"].keys() == {"config"}
    config = json.loads(definition["spec"]["config"])
    assert (config["type"], config["mode"]) == ("afxdp", pool["mode"])
    assert config["skipUnloadBpf"] is True
    assert config["dpSyncer"] is True


@pytest.mark.parametrize("path", sorted((KUBERNETES / "pods").iterdir()), ids=lambda path: path.stem)
def test_pod_asks_for_a_device_and_for_what_af_xdp_needs(path: Path) -> None:
    """Each example names the network and its resource, has NET_RAW, and a seccomp profile that allows bpf(2)."""
    (pod,) = [found for found in objects(path.read_text()) if found["kind"] == "Pod"]
    definition = network()
    assert pod["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": definition["metadata"]["name"]}
    spec = pod["spec"]
    (app,) = spec["containers"]
    resource = definition["metadata"]["annotations"]["k8s.v1.cni.cncf.io/resourceName"]
    assert app["resources"]["limits"][resource] == "1"
    assert app["resources"]["requests"] == app["resources"]["limits"]
    assert app["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_RAW", "IPC_LOCK"]}
    assert app["securityContext"]["allowPrivilegeEscalation"] is False
    assert spec["securityContext"]["seccompProfile"] == {"type": "Unconfined"}
    assert not {"hostNetwork", "hostname"} & spec.keys()  # the hostname has to be the pod's name
    assert "hostPath" not in json.dumps(spec)


def test_cndp_configuration_is_json_when_the_device_is_in_it() -> None:
    """What the container makes of the ConfigMap is CNDP's configuration, with the socket's path in the pod."""
    (config_map,) = [
        found for found in objects((KUBERNETES / "pods" / "cndp.yaml").read_text()) if found["kind"] == "ConfigMap"
    ]
    config = json.loads(config_map["data"]["fwd.jsonc"].replace("@DEVICE@", "ens1f0"))
    assert config["options"]["uds_path"] == "/tmp/afxdp_dp/ens1f0/afxdp.sock"
    assert list(config["lports"]) == config["threads"]["fwd:0"]["lports"] == ["ens1f0:0"]
