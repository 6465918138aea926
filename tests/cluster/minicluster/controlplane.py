"""etcd, kube-apiserver and kube-controller-manager as processes in the network namespace that we are in."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import time
from typing import TYPE_CHECKING

import aiohttp

from minicluster import binaries, pki
from minicluster.client import ApiError, Client

if TYPE_CHECKING:
    from pathlib import Path

ADDRESS = "10.244.0.1"  # of the bridge: the API server's, and the node's
PORT = 6443
SERVER = f"https://{ADDRESS}:{PORT}"
ISSUER = "https://kubernetes.default.svc"
SERVES_WITHIN = 120.0  # 5 s on two idle cores; machines pause
CONTROLLERS = (
    "clusterrole-aggregation",
    "cronjob",
    "daemonset",
    "deployment",
    "disruption",
    "endpoints",
    "endpointslice",
    "garbage-collector",
    "horizontal-pod-autoscaler",
    "job",
    "namespace",
    "replicaset",
    "root-ca-certificate-publisher",
    "serviceaccount",
    "statefulset",
)
# What changes something, with who did it: tests count writes. Reads would be most of it.
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "None", "verbs": ["get", "list", "watch"]}, {"level": "Metadata"}],
}


class ControlPlane:
    """The three processes and what they were given; all state lies in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = pki.Authority(folder)
        self.token = secrets.token_urlsafe(24)
        self.node_token = secrets.token_urlsafe(24)
        self.kubeconfig = folder / "kubeconfig"
        self._programs = binaries.find()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        """Start all and return when the API server serves.

        Raises:
            RuntimeError: It did not; the message ends with what it logged last.
        """
        self._write()
        self._start_etcd()
        self._start_api_server()
        await self._serving()
        # It gives up when the API server does not serve yet.
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={self.folder / 'accounts.key'}",
            f"--root-ca-file={self.authority.path}",
            f"--tls-cert-file={self.folder / 'kube-apiserver.crt'}",
            f"--tls-private-key-file={self.folder / 'kube-apiserver.key'}",
            f"--controllers={','.join(f'{name}-controller' for name in CONTROLLERS)}",
            "--horizontal-pod-autoscaler-sync-period=1s",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            "--use-service-account-credentials=false",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            "--profiling=false",
        )

    def _write(self) -> None:
        folder = self.folder
        (folder / "tokens.csv").write_text(
            f"{self.token},admin,admin,system:masters\n{self.node_token},node,node,system:masters\n"
        )
        (folder / "audit.json").write_text(json.dumps(AUDIT))
        pki.write_key(folder / "accounts.key", pki.new_key())
        names = [ADDRESS, "127.0.0.1", "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        self.authority.issue("kube-apiserver", hosts=names)
        self.authority.issue("kubelet", hosts=[ADDRESS])
        self.authority.issue("proxy", hosts=[ADDRESS])  # faults.py, for tests
        self.authority.issue("kubelet-client", group="system:masters")
        self.kubeconfig.write_text(kubeconfig(SERVER, self.token, self.authority.path))

    def _start_etcd(self) -> None:
        self._start(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--log-level=warn",
            "--unsafe-no-fsync",
        )

    def _start_api_server(self) -> None:
        folder = self.folder
        self._start(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            "--bind-address=0.0.0.0",
            f"--secure-port={PORT}",
            f"--advertise-address={ADDRESS}",
            f"--tls-cert-file={folder / 'kube-apiserver.crt'}",
            f"--tls-private-key-file={folder / 'kube-apiserver.key'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            f"--service-account-key-file={folder / 'accounts.pub'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            # No kube-proxy: a webhook's Service is called at the addresses of its endpoints.
            "--enable-aggregator-routing=true",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-certificate-authority={self.authority.path}",
            f"--kubelet-client-certificate={folder / 'kubelet-client.crt'}",
            f"--kubelet-client-key={folder / 'kubelet-client.key'}",
            f"--audit-policy-file={folder / 'audit.json'}",
            f"--audit-log-path={folder / 'audit.log'}",
            "--profiling=false",
        )

    def _start(self, name: str, *flags: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(  # noqa: S603 - the control plane
                [self._programs[name], *flags], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder
            )

    async def _serving(self) -> None:
        """Return when the API server is ready."""
        deadline = time.monotonic() + SERVES_WITHIN
        async with Client(SERVER, self.token, self.authority.path) as client:
            while True:
                for name, process in self._running.items():
                    if process.poll() is not None:
                        raise RuntimeError(f"{name} ended with {process.returncode}:\n{self._last(name)}")
                try:
                    await client.call("GET", "/readyz", timeout=2.0)
                except (ApiError, aiohttp.ClientError, TimeoutError):
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"kube-apiserver does not serve:\n{self._last('kube-apiserver')}") from None
                    await asyncio.sleep(0.05)
                else:
                    return

    def _last(self, name: str) -> str:
        return "\n".join((self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])


def kubeconfig(server: str, token: str, authority: Path, namespace: str = "default") -> str:
    """Return a kubeconfig (as JSON, which is YAML) with the token."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": server, "certificate-authority": os.fspath(authority)}}
            ],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "current-context": "test",
        }
    )
