"""``python -m carpool_cli``."""

from carpool_cli.main import main

main(prog_name="carpool")
