"""Network policies for ingress to pods, and for callers' egress: Kubernetes' own, Cilium's and Calico's."""
