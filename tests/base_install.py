"""What can be imported where jaxserve is installed without an extra, as code that such a process runs."""

# Modules, and those below them, that commands are or that an extra is for.
_MORE = ("__main__", "cli", "ray.application", "ray.control", "ray.hosts", "ray.routing", "routing", "serving")
IMPORT_THE_OTHERS = f"""
import checkpoints, importlib, jaxserve, kernels, pkgutil
for package in (jaxserve, kernels, checkpoints):
    print(package.__file__)
    for module in pkgutil.walk_packages(package.__path__, f"{{package.__name__}}."):
        if not module.name.startswith({tuple(f"jaxserve.{name}" for name in _MORE)}):
            importlib.import_module(module.name)
"""
