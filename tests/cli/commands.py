"""Modules of the commands that tests start in a process of their own, by what a user calls them."""

from jaxserve.cli.main import COMMANDS

MODULES = {name: "jaxserve.cli." + name.replace(" ", ".").replace("-", "_") for name in COMMANDS if name != "version"}
MODULES["validate_simulator"] = "scripts.validate_simulator"
