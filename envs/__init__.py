"""Environments beside the scripts; a folder envs where the user stands is searched as well."""

from pkgutil import extend_path

# Without this file a user's package envs, though later on sys.path, would hide the project's.
__path__ = extend_path(__path__, __name__)
