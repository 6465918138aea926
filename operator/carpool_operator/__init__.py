"""The cluster side: watches policies, tunes fleets of sidecars, and adds sidecars to pods of model workloads."""
