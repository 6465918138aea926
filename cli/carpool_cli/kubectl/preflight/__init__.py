"""`kubectl carpool preflight`: what a sidecar would break or miss, before anything changes."""
