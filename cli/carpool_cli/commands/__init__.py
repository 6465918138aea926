"""The subcommands of `carpool`, one file each."""
