"""The pure modules and the two pipelines, against oracles that share no code with them."""

from hypothesis import settings

__all__: list[str] = []

# How long an example takes says nothing on a machine that others use, too; the hang guard of pytest stays.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
