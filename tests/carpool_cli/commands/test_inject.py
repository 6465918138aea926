from __future__ import annotations

import itertools
import json

import pytest
import yaml
from click.testing import CliRunner
from manifests_to_inject import KEY, MANIFESTS, config, template

from carpool_cli.main import main


def test_a_sidecar_that_tunes_itself(inject):
    result = inject(MANIFESTS, "--slo-p99", "50ms")
    assert (result.exit_code, result.stderr) == (0, "")
    pod = template(result.stdout)
    read = config(pod)
    assert (read.policy.slo.due, read.parameters, read.public_key, read.changes) == (0.05, {}, None, None)
    assert pod["spec"]["containers"][0]["ports"][0] == {"name": "http", "containerPort": 14080}
    assert "volumes" not in pod["spec"]
    # None of the operator's
    assert "carpool.dev/injected" not in pod["metadata"]["labels"]


def test_a_sidecar_under_an_operator(inject, tmp_path):
    (tmp_path / "key.txt").write_text(KEY + "\n")
    for given in (KEY, KEY.upper(), tmp_path / "key.txt"):
        result = inject(MANIFESTS, "--public-key", given)
        assert (result.exit_code, result.stderr) == (0, "")
        pod = template(result.stdout)
        read = config(pod)
        assert (read.target, read.public_key) == ("models/Deployment/resnet", KEY)
        assert pod["metadata"]["labels"]["carpool.dev/injected"] == "true"
        assert pod["spec"]["volumes"][0]["configMap"] == {"name": "carpool-deployment-resnet", "optional": True}


def test_what_is_not_changed_is_printed_as_it_was(inject):
    out = inject(MANIFESTS, "--slo-p99", "50ms").stdout
    head, tail = MANIFESTS.split("    metadata: {labels", 1)
    assert out.startswith(head)
    assert out.endswith("--- # behind it" + tail.split("--- # behind it")[1])
    assert "image: your-model-server   # yours\n" in out


ISVC = """\
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: iris, annotations: {"other": "x"}}
spec: {predictor: {model: {modelFormat: {name: onnx}}}}
"""
RAY = """\
apiVersion: ray.io/v1
kind: RayService
metadata: {name: text}
spec: {rayClusterConfig: {}}
"""


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (ISVC, 3, "inferenceservice/iris: this command can't add its sidecars: annotate it, e.g. carpool.dev/slo-"),
        (ISVC.replace('"other": "x"', "carpool.dev/slo-p99: 50ms"), 0, "the webhook adds its sidecars"),
        (ISVC.replace('"other": "x"', 'carpool.dev/slo-p99: "50"'), 3, "annotate it"),
        (RAY, 3, "rayservice/text: this command can't add its sidecars: write carpool.dev/inject: "),
        (MANIFESTS + "---\n" + ISVC, 3, "inferenceservice/iris: "),
    ],
)
def test_a_workload_whose_pods_its_controller_describes_is_for_the_webhook(inject, text, code, said):
    result = inject(text, "--slo-p99", "50ms")
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stdout.endswith(text[-80:])
    assert inject(text, "--undo").exit_code == 0


@pytest.mark.parametrize("nothing", [" null", " ~", "", "   # none", " null  # none"])
def test_a_null_is_edited_in_place(inject, nothing):
    metadata = f"metadata:\n      annotations:{nothing}\n      labels: {{app: resnet}}"
    text = MANIFESTS.replace("metadata: {labels: {app: resnet}}", metadata)
    result = inject(text, "--slo-p99", "50ms")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "image: your-model-server   # yours\n" in result.stdout
    assert ("# none" in nothing) == ("# none" in result.stdout)
    assert "carpool.dev/status" in template(result.stdout)["metadata"]["annotations"]
    undone = inject(result.stdout, "--undo")
    assert undone.stderr == ""
    assert list(yaml.safe_load_all(undone.stdout)) == list(yaml.safe_load_all(text))


def test_twice_is_once(inject):
    once = inject(MANIFESTS, "--slo-p99", "50ms").stdout
    again = inject(once, "--slo-p99", "50ms")
    assert again.stdout == once
    assert again.exit_code == 0
    assert again.stderr == "deployment/resnet: AlreadyInjected: a container named carpool is in the pod\n"


def test_the_same_input_gives_the_same_output(inject, tmp_path):
    # A pipeline that runs it each time would roll all pods otherwise
    (tmp_path / "secret").write_bytes(b"known to few")
    both = MANIFESTS + "---\n" + MANIFESTS.replace("name: resnet,", "name: other,")
    printed = inject(both, "--slo-p99", "50ms").stdout
    assert inject(both, "--slo-p99", "50ms").stdout == printed
    keys = {config(template(printed, index)).drain_key for index in (0, 2)}
    secret = inject(both, "--slo-p99", "50ms", "--drain-secret", tmp_path / "secret").stdout
    keys |= {config(template(secret, index)).drain_key for index in (0, 2)}
    newer = inject(both.replace("your-model-server", "newer"), "--slo-p99", "50ms").stdout
    assert len(keys | {config(template(newer)).drain_key}) == 5


@pytest.mark.parametrize("content", [b"", b" \r\n\n"])
def test_an_empty_secret_is_refused(content, inject, tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(content)
    refused = inject(MANIFESTS, "--slo-p99", "50ms", "--drain-secret", path)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"{path}: the file is empty" in refused.stderr
    assert f"write a secret to it, e.g. openssl rand -hex 32 > {path}\n" in refused.stderr


BY_NUMBER = MANIFESTS.replace(
    "{ports: [{port: 80, targetPort: http}]}", "{selector: {app: resnet}, ports: [{port: 80, targetPort: 9000}]}"
)


def test_secrets_for_the_image_are_added_and_it_is_said_what_that_switches_off(inject):
    """The API server adds the pull secrets of a ServiceAccount to pods that name none, and only to these."""
    options = ("--slo-p99", "50ms", "--image-pull-secret", "registry")
    result = inject(MANIFESTS, *options)
    assert template(result.stdout)["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert "deployment/resnet: imagePullSecrets are named now" in result.stderr
    assert inject(result.stdout, "--undo").stdout == MANIFESTS
    own = MANIFESTS.replace("      containers:", "      imagePullSecrets: [{name: own}]\n      containers:")
    result = inject(own, *options)
    assert template(result.stdout)["spec"]["imagePullSecrets"] == [{"name": "own"}, {"name": "registry"}]
    assert result.stderr == ""
    assert inject(result.stdout, "--undo").stdout == own
    assert inject(own, "--undo", "--image-pull-secret", "registry").exit_code == 2


NETWORK = """---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: callers}
spec: {podSelector: {matchLabels: {app: resnet}}, ingress: [{ports: [{port: PORT}]}]}
"""
SCALER = """---
apiVersion: autoscaling/VERSION
kind: HorizontalPodAutoscaler
metadata: {name: busy}
spec: {scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: resnet}, maxReplicas: 9, METRIC}
"""
V1 = "targetCPUUtilizationPercentage: 60"
OF_ALL = "metrics: [{type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 60}}}]"
OF_ONE = (
    "metrics: [{type: ContainerResource, containerResource: "
    "{name: cpu, container: server, target: {type: Utilization, averageUtilization: 60}}}]"
)


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (
            NETWORK.replace("PORT", "9000"),
            "NetworkPolicyByNumber: NetworkPolicy callers admits port 9000 and",
        ),
        (NETWORK.replace("PORT", "http"), ""),
        (NETWORK.replace("PORT", "9000").replace("{name: callers}", "{name: callers, namespace: elsewhere}"), ""),
        (SCALER.replace("VERSION", "v1").replace("METRIC", V1), "HPAOnPercentage: HorizontalPodAutoscaler busy"),
        (SCALER.replace("VERSION", "v2").replace("METRIC", OF_ALL), "HPAOnPercentage: HorizontalPodAutoscaler busy"),
        (SCALER.replace("VERSION", "v2").replace("METRIC", OF_ONE), ""),
        ("---\napiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\nmetadata: {name: empty}\n", ""),
    ],
)
@pytest.mark.parametrize("namespace", ["models", None])
def test_what_a_sidecar_breaks_in_the_same_input_is_named(inject, other, code, namespace):
    model = MANIFESTS if namespace else MANIFESTS.replace(", namespace: models", "")
    if namespace is None and "elsewhere" in other:  # the workload may be there, too
        code = "NetworkPolicyByNumber: "
    result = inject(model + other, "--slo-p99", "50ms")
    assert result.exit_code == 0
    assert result.stdout.endswith(other)
    if code:
        assert f"deployment/resnet: {code}" in result.stderr
        assert "Correct it in the manifest" in result.stderr
    else:
        assert result.stderr == ""
    assert result.stderr == inject(other + "---\n" + model, "--slo-p99", "50ms").stderr


@pytest.mark.parametrize("name", ["", "Bad Name", "a_b", "-a", "a" * 254])
def test_a_secret_s_name_is_checked(inject, name):
    result = inject(MANIFESTS, "--slo-p99", "50ms", "--image-pull-secret", "a.b-1", "--image-pull-secret", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--image-pull-secret: {name!r} is no name of a Secret" in result.stderr


def test_a_sidecar_that_can_not_be_pulled_as_asked_has_other_settings(inject):
    """After ImagePullBackOff, a user runs the command again with a secret, or with another image."""
    slo = ("--slo-p99", "50ms")
    once = inject(MANIFESTS, *slo, "--image-pull-secret", "b", "--image", "registry/carpool:1").stdout
    for options in ((), ("--image-pull-secret", "b"), ("--image", "registry/carpool:1")):
        assert inject(once, *slo, *options).exit_code == 0
    for options in (("--image-pull-secret", "reg"), ("--image", "registry/carpool:2")):
        result = inject(once, *slo, *options)
        assert (result.exit_code, result.stdout) == (3, once)
        assert "its sidecar has other settings" in result.stderr


def test_a_service_that_bypasses_the_sidecar_is_named_with_the_fix(inject):
    deployment, service = BY_NUMBER.split("--- # behind it\n")
    said = (
        "service/resnet: ServiceBypassed: port 80 leads to deployment/resnet by number and bypasses the sidecar: "
        "nothing is batched. Correct it: write targetPort: http in the Service\n"
    )
    for text in (BY_NUMBER, f"{service}---\n{deployment}"):
        result = inject(text, "--slo-p99", "50ms")
        assert (result.exit_code, result.stderr) == (0, said)
    # One that was injected before is bypassed all the same
    assert inject(inject(BY_NUMBER, "--slo-p99", "50ms").stdout, "--slo-p99", "50ms").stderr.endswith(said)
    unnamed = inject(BY_NUMBER.replace("{name: http, containerPort", "{containerPort"), "--slo-p99", "50ms").stderr
    assert "Correct it: name the model's port http in deployment/resnet, and write targetPort: http in the" in unnamed


def test_services_of_other_pods_or_that_are_none_are_not_named(inject):
    for other in (
        BY_NUMBER.replace("selector: {app: resnet}", "selector: {app: other}"),
        BY_NUMBER.replace("{name: resnet}\n", "{name: resnet, namespace: others}\n"),
        BY_NUMBER.replace("ports: [{port: 80, targetPort: 9000}]", "ports: [80]"),
    ):
        assert other != BY_NUMBER
        assert inject(other, "--slo-p99", "50ms").stderr == ""


def test_a_sidecar_with_other_settings_stays_and_it_is_said(inject):
    for first, second in itertools.permutations(
        [("--slo-p99", "50ms"), ("--slo-p99", "0.1s"), ("--public-key", KEY)], 2
    ):
        once = inject(MANIFESTS, *first).stdout
        again = inject(once, *second)
        assert (again.exit_code, again.stdout) == (3, once)
        assert again.stderr == (
            "deployment/resnet: AlreadyInjected: its sidecar has other settings, and stays as it is: "
            "take it out with carpool inject --undo first\n"
        )
        assert inject(once, *first).exit_code == 0
    by_hand = MANIFESTS.replace("- name: server", "- name: carpool\n        - name: server")
    assert inject(by_hand, "--slo-p99", "50ms").exit_code == 0


def test_from_the_standard_input():
    result = CliRunner().invoke(main, ["inject", "-f", "-", "--slo-p99", "1s"], input=MANIFESTS)
    assert config(template(result.stdout)).policy.slo.due == 1.0


def test_json_stays_json(inject):
    deployment, service = yaml.safe_load_all(MANIFESTS)
    given = {"apiVersion": "v1", "kind": "List", "items": [deployment, service]}
    result = inject(json.dumps(given), "--slo-p99", "50ms")
    printed = json.loads(result.stdout)
    assert config(printed["items"][0]["spec"]["template"]).policy.slo.due == 0.05
    assert printed["items"][1] == service
    unchanged = json.dumps(service)
    assert inject(unchanged, "--slo-p99", "50ms").stdout == unchanged
    # YAML may begin with a brace as well
    assert "initContainers" in inject(yaml.safe_dump(deployment, default_flow_style=True), "--slo-p99", "50ms").stdout


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("before", ["%YAML 1.2\n---\n", "# it is new\n%YAML 1.1 # not that\n\n--- # so\n", "---\n"])
def test_directives_are_printed_as_they_were(carpool, tmp_path, before, end):
    path = tmp_path / "manifests.yaml"
    text = f"{before}{MANIFESTS}...\n{before}{MANIFESTS}...\n".replace("\n", end)
    path.write_bytes(text.encode())
    result = carpool("inject", "-f", path, "--slo-p99", "50ms")
    assert (result.exit_code, result.stderr) == (0, "")
    printed = result.stdout.replace("\r\n", "\n")
    assert printed.count(before) == 2
    assert [line for line in printed.splitlines() if line.startswith("...")] == ["..."] * 2
    for index in (0, 2):
        assert config(template(printed.replace("%YAML 1.2", "%YAML 1.1"), index)).policy.slo.due == 0.05


def test_a_generated_name_is_enough_for_a_sidecar_that_tunes_itself(inject):
    generated = MANIFESTS.replace("{name: resnet,", "{generateName: resnet-,")
    result = inject(generated, "--slo-p99", "50ms")
    assert (result.exit_code, result.stderr) == (0, "")
    assert config(template(result.stdout)).policy.slo.due == 0.05


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet", "ReplicaSet"])
def test_other_workloads(inject, kind):
    other = MANIFESTS.replace("kind: Deployment", f"kind: {kind}")
    assert inject(other, "--slo-p99", "50ms").exit_code == 0
    under = inject(other, "--public-key", KEY)
    assert config(template(under.stdout)).target == f"models/{kind}/resnet"


def test_the_leaders_of_a_set_get_their_sidecars(inject):
    of_set = yaml.safe_load(MANIFESTS.replace("kind: Deployment", "kind: LeaderWorkerSet").split("---")[0])
    leader = of_set["spec"].pop("template")
    of_set["spec"]["leaderWorkerTemplate"] = {"leaderTemplate": leader, "workerTemplate": leader}
    printed = yaml.safe_load(inject(yaml.safe_dump(of_set), "--public-key", KEY).stdout)

    templates = printed["spec"]["leaderWorkerTemplate"]
    assert config(templates["leaderTemplate"]).target == "models/LeaderWorkerSet/resnet"
    assert templates["workerTemplate"] == leader


def test_what_has_no_template_of_its_own_is_left_alone(inject):
    service = "kind: InferenceService\nmetadata: {name: bert}\nspec: {predictor: {model: {}}}\n"

    assert inject(service, "--slo-p99", "50ms").stdout == service


def test_a_pod_by_itself(inject):
    pod = "kind: Pod\nmetadata: {name: alone}\nspec:\n  containers: [{name: a, ports: [{containerPort: 1}]}]\n"
    assert config(yaml.safe_load(inject(pod, "--slo-p99", "50ms").stdout)).upstream.url == "http://localhost:1"
    assert "UnknownOwner" in inject(pod, "--public-key", KEY, "-n", "models").stderr


def test_a_workload_that_gets_its_sidecar_with_a_warning_is_reported(inject):
    unnamed = MANIFESTS.replace("{name: http, containerPort: 9000}", "{containerPort: 9000}")
    result = inject(unnamed, "--slo-p99", "50ms")
    assert result.exit_code == 0
    assert result.stderr.startswith("deployment/resnet: PortUnnamed: The model's port has no name")
    assert "initContainers" in template(result.stdout)["spec"]


def test_who_can_not_have_one_is_named(inject):
    two = MANIFESTS.replace("ports: [{name: http, containerPort: 9000}]", "ports: []") + "---\n" + MANIFESTS
    result = inject(two, "--slo-p99", "50ms")
    assert result.exit_code == 3
    assert result.stderr.startswith("deployment/resnet: NoPort: container server names no port: ")
    assert "initContainers" not in template(result.stdout)["spec"]
    assert "initContainers" in template(result.stdout, 2)["spec"]


def test_who_forbids_it_is_left_alone(inject):
    forbidden = MANIFESTS.replace(
        "{labels: {app: resnet}}\n    spec", '{annotations: {carpool.dev/inject: "false"}}\n    spec'
    )
    result = inject(forbidden, "--slo-p99", "50ms")
    assert (result.exit_code, result.stdout) == (0, forbidden)
    assert "Disabled" in result.stderr


def test_nothing_with_pods_is_said(inject):
    result = inject("kind: ConfigMap\n---\n# nothing\n", "--slo-p99", "50ms")
    assert (result.exit_code, result.stdout) == (0, "kind: ConfigMap\n---\n# nothing\n")
    assert result.stderr == "nothing here has pods: there is no workload with a pod template, and no Pod\n"


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (MANIFESTS, (), "name --slo-p99 50ms"),
        (MANIFESTS, ("--slo-p99", "50ms", "--public-key", KEY), "one of them"),
        (MANIFESTS, ("--slo-p99", "50"), "not a duration"),
        (MANIFESTS, ("--slo-p99", "0s"), "--slo-p99: slo.latency"),
        (MANIFESTS, ("--public-key", "key.txt"), "neither 64 hex digits nor a file with them"),
        (MANIFESTS.replace(", namespace: models", ""), ("--public-key", KEY), "add -n NAMESPACE"),
        (
            MANIFESTS.replace("{name: resnet,", "{generateName: resnet-,"),
            ("--public-key", KEY),
            "deployment/resnet- has a generateName, and the operator's changes are for a workload of one name: write",
        ),
        (
            MANIFESTS.replace("{name: resnet,", "{"),
            ("--public-key", KEY),
            "a Deployment is not a valid Kubernetes object",
        ),
        (
            "kind: Pod\nmetadata: {name: x, annotations: {carpool.dev/port: 8000}}\nspec: {containers: []}\n",
            ("--slo-p99", "50ms"),
            'pod/x: carpool.dev/port is 8000, which is no text: write "8000", in quotes',
        ),
        ("kind: X\n---\nb: [\n", ("--slo-p99", "50ms"), "line "),
        ("kind: Deployment\n", ("--slo-p99", "50ms"), "a Deployment is not a valid Kubernetes object"),
        (
            "kind: Pod\nmetadata: {}\nspec: {containers: []}\n",
            ("--slo-p99", "50ms"),
            "a Pod is not a valid Kubernetes object",
        ),
    ],
)
def test_wrong_input_is_named_in_a_line(inject, text, options, said):
    result = inject(text, *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_file_that_is_not_there(carpool):
    result = carpool("inject", "-f", "nowhere.yaml", "--slo-p99", "50ms")
    assert (result.exit_code, result.stderr) == (2, "Error: nowhere.yaml: No such file or directory\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("just words\n", "the document in line 1 is not a manifest"),
        ("kind: ConfigMap\n---\nwords\n", "the document in line 3 is not a manifest"),
        ("[project]\nname = 'x'\n", "line 2 is not YAML"),
        ("kind: X\n---\n# Title\n\n*Words*\n", "line 5 is not YAML"),
        (
            "kind: X\nspec:\n\tx: 1\n",
            "line 3 is not YAML, found character '\\t' that cannot start any token; use spaces",
        ),
        ("\x7fELF\x00", "line 1 is not YAML, it has characters that are not text"),
        ("kind: ConfigMap\n---\nname: x\n", "the document in line 3 is not a manifest"),
        ("kind: X\n--- {kind: Pod}\n", "line 2 has --- and more: put a line break behind it"),
        ("--- !!map\nkind: X\n", "line 1 has --- and more"),
        ("--- &all\nkind: X\n", "line 1 has --- and more"),
        ("--- text\n", "line 1 has --- and more"),
        ("kind: X\n... text\n", "line 2 has ... and more"),
        ("%YAML 1.2\n", "line 2 is not YAML"),
        ("%YAML 1.2\nkind: X\n---\n", "line 2 is not YAML"),
        ("- a\n- b\n", "the document in line 1 is not a manifest"),
        ('{"name": "x"}', "the document in line 1 is not a manifest"),
        ('{"kind": ' + 100_000 * "[" + 100_000 * "]" + "}", "line 1 is not YAML, it is nested too deeply"),
        ("", "it is empty"),
        ("\n\n", "it is empty"),
    ],
)
def test_a_file_that_is_no_manifest_is_named_with_the_line(carpool, tmp_path, text, says):
    path = tmp_path / "file"
    path.write_text(text)
    result = carpool("inject", "-f", path, "--slo-p99", "50ms")
    assert result.exit_code == 2
    assert result.output.startswith(f"Error: {path}: {says}")
    assert result.output.endswith(": give Kubernetes manifests, YAML or JSON\n")
    assert result.output.count("\n") == 1


JOB = """\
apiVersion: batch/v1
kind: Job
metadata: {name: nightly}
spec:
  template:
    spec:
      restartPolicy: Never
      containers: [{name: server, image: your-model-server, ports: [{name: http, containerPort: 9000}]}]
"""
CRON_JOB = """\
apiVersion: batch/v1
kind: CronJob
metadata: {name: nightly}
spec:
  schedule: 0 2 * * *
  jobTemplate:
    spec:
      template:
        spec:
          restartPolicy: Never
          containers: [{name: server, image: your-model-server, ports: [{name: http, containerPort: 9000}]}]
"""


@pytest.mark.parametrize(
    ("text", "path"), [(JOB, ["spec", "template"]), (CRON_JOB, ["spec", "jobTemplate", "spec", "template"])]
)
def test_a_job_may_have_a_sidecar_that_tunes_itself_and_no_other(inject, text, path):
    result = inject(text, "--slo-p99", "50ms")
    assert (result.exit_code, result.stderr) == (0, "")
    pod = yaml.safe_load(result.stdout)
    for step in path:
        pod = pod[step]
    assert config(pod).policy.slo.due == 0.05
    undone = inject(result.stdout, "--undo")
    assert yaml.safe_load(undone.stdout) == yaml.safe_load(text)
    refused = inject(text, "--public-key", KEY, "-n", "models")
    assert refused.exit_code == 2
    assert "use --slo-p99" in refused.stderr


def test_annotations_that_nobody_reads_are_named(inject):
    annotated = MANIFESTS.replace(
        "namespace: models}",
        "namespace: models, annotations: {carpool.dev/objectiv: Latency, carpool.dev/slo-p99: 80ms}}",
    ).replace(
        "metadata: {labels: {app: resnet}}", 'metadata: {labels: {app: resnet}, annotations: {carpool.dev/por: "9000"}}'
    )
    result = inject(annotated, "--slo-p99", "50ms")
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert [line for line in lines if "did you mean carpool.dev/objective?" in line]
    assert [line for line in lines if "did you mean carpool.dev/port?" in line]
    assert "deployment/resnet: carpool.dev/slo-p99 is for an operator: here --slo-p99 counts" in lines
    assert config(template(result.stdout)).policy.slo.due == 0.05
