"""A plugin of pytest's (`-p tests.parallel.on_two_stages`): every engine on the dummy model is a pipeline of two stages."""

from tests import dummy

dummy.SETTINGS["pipeline_parallel_size"] = 2
