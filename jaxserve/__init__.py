"""jaxserve: a JAX-native LLM inference engine. The public names are listed in __init__.pyi, and imported when first used."""

from jaxserve import moved
from jaxserve.lazy_names import attach

_find, _names, __all__ = attach(__name__, __file__)
moved.install()


def __getattr__(name: str) -> object:
    return _version() if name == "__version__" else _find(name)


def _version() -> str:
    """Of the installed distribution; in a checkout that is not installed, pyproject.toml's."""
    from importlib import metadata
    from pathlib import Path

    try:
        return metadata.version("jaxserve")
    except metadata.PackageNotFoundError:
        import tomllib

        with open(Path(__file__).parents[1] / "pyproject.toml", "rb") as file:
            return tomllib.load(file)["project"]["version"]


def __dir__() -> list[str]:
    return [*_names(), "__version__"]
