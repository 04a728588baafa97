"""Hydra does once in a process what it would do again in each composition: parse the
files of configs/ and its own, choose among them, and merge those of equal choices.

That is most of a composition, of which tests make a thousand. Other directories, as a
user's, are read each time.
"""

import dataclasses
import pickle
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.defaults_list import Overrides
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource

CONFIGS = Path(__file__).resolve().parents[2] / "trainer" / "configs"
_made: dict[Hashable, bytes] = {}


def _once(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return a copy of what `make` has returned for this key."""
    if key not in _made:
        _made[key] = pickle.dumps(make())
    return pickle.loads(_made[key])


def _stays(source: ConfigSource) -> bool:
    return source.scheme() != "file" or source.path.endswith(str(CONFIGS))


def _key(repo: IConfigRepository, *rest: Hashable) -> Hashable | None:
    """Return what a result depends on; None: on files that may change."""
    sources = repo.get_sources()
    if not all(map(_stays, sources)):
        return None
    return tuple((source.provider, source.path) for source in sources), rest


def _parse_once(source: type[ConfigSource]) -> None:
    read = source.load_config

    def load_config(self: ConfigSource, config_path: str) -> ConfigResult:
        if not _stays(self):
            return read(self, config_path)
        key = self.provider, self.path, config_path
        return _once(key, lambda: read(self, config_path))

    source.load_config = load_config


# Once they are found: finding executes their modules anew, with classes of their own.
for _source in Plugins.instance().discover(ConfigSource):
    if _source.scheme() in ("file", "pkg"):
        _parse_once(_source)

_choose = config_loader_impl.create_defaults_list
_merge = config_loader_impl.ConfigLoaderImpl._compose_config_from_defaults_list


def _choose_once(
    repo: IConfigRepository, overrides_list: Sequence[Override], **settings: Any
) -> Any:
    """Only overrides of groups choose files; those of values are applied to these."""
    choices = [
        o.input_line for o in overrides_list if repo.group_exists(o.key_or_group)
    ]
    key = _key(repo, *choices, *settings.values())
    choose = lambda: _choose(repo, overrides_list=overrides_list, **settings)
    if key is None:
        return choose()
    values = Overrides(repo, overrides_list).config_overrides
    return dataclasses.replace(_once(key, choose), config_overrides=values)


def _merge_once(self: Any, defaults: Sequence[Any], repo: IConfigRepository) -> Any:
    key = _key(repo, *map(repr, defaults))
    merge = lambda: _merge(self, defaults, repo)
    return merge() if key is None else _once(key, merge)


_get_mode = Hydra.get_mode


def _mode_if_given(
    self: Hydra, config_name: str | None, overrides: list[str]
) -> Any | None:
    """Only a key of Hydra's sets its mode, for which it composes all a second time."""
    given = any("hydra" in override for override in overrides)
    return _get_mode(self, config_name, overrides) if given else None


Hydra.get_mode = _mode_if_given
config_loader_impl.create_defaults_list = _choose_once
config_loader_impl.ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once
