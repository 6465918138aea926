"""The cluster side: a policy is watched, a fleet of sidecars is tuned, model Deployments get their sidecars."""
