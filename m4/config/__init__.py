"""Configs: from gin files and bindings to an `Experiment`. Of gin, only the parser is used.

gin's own configuration is one for the process, applies a scope only while a function runs, and says
where a mistake is in prose. Here a config is an object: every binding knows its file and line, a
reference becomes a plain object or `functools.partial` that can cross to another process, and a
scope holds for everything below the reference that names it.

A config that is read from a run's folder is data: it may name m4's settings and what the user
allows by name, nothing else (`allowed_modules`).
"""

from m4.config.bindings import ConfigError as ConfigError
from m4.config.bindings import find_file as find_file
from m4.config.bindings import near as near
from m4.config.config import Config as Config
from m4.config.config import load as load
from m4.config.config import of_experiment as of_experiment
