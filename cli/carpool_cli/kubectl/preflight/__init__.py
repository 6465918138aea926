"""`kubectl carpool preflight`: finds what a sidecar would break or bypass, before anything changes."""
