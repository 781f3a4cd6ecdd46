"""One engine over several processes: which process is which, the links between them, and who of them is lost.

A host here is one process of the group, with the devices that it sees. Host 0 leads: it has the engine. The others follow: they
run each command that host 0's runner runs. Knows nothing of models or engines.
"""
