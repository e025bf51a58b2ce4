"""Example environments. A package called envs in the working directory is searched as well."""

from pkgutil import extend_path

# Without this line, only one of two packages named envs could be imported.
__path__ = extend_path(__path__, __name__)
