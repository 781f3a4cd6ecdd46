"""A plugin of pytest's (`-p tests.parallel.on_two_devices`): every engine on the dummy model runs on two devices."""

from tests import dummy

dummy.SETTINGS["tensor_parallel_size"] = 2
