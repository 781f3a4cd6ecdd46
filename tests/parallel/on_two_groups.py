"""A plugin of pytest's (`-p tests.parallel.on_two_groups`): every engine on the dummy model runs on two devices, each of which
attends to requests of its own."""

from tests import dummy

dummy.SETTINGS |= {"tensor_parallel_size": 2, "attention_groups": 2}
