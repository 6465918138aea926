"""What `helm test` says where the API server does not answer its pod."""

import socket
import subprocess
import sys
import time

from chart import CHART

from carpool_operator.webhook.certificates import issue

HOME = "/var/run/secrets/kubernetes.io/serviceaccount"


def test_where_the_api_server_does_not_answer_it_asks_again_and_says_so(tmp_path):
    _, authority = issue(("kubernetes",), time.time())
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_bytes(authority)
    script = (CHART / "checks" / "installed.py").read_text()
    for here, there in ((HOME, str(tmp_path)), ("PATIENCE = 15", "PATIENCE = 1")):
        assert script.count(here) == 1
        script = script.replace(here, there)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server = {
            "NAMESPACE": "carpool-system", "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(unused.getsockname()[1]),
        }  # fmt: skip
        done = subprocess.run(  # noqa: S603 - ours
            [sys.executable, "-c", script], env=server, capture_output=True, text=True, check=False, timeout=120
        )
    assert done.returncode == 1
    assert done.stderr.startswith("the API server does not answer this pod")
    assert len(done.stderr.splitlines()) == 1
