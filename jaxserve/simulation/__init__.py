"""The engine in virtual time, and the searches that are made with it.

replica: one engine, the real scheduler with a clock in place of a device; pipeline: several stages; cluster: several replicas
behind the router; replay: a workload on one of them. records: what came of requests and steps. decode_runs, pipeline_runs: many
certain steps at once. bucket_search, tuning: the best bucket plan and budget for a workload. capacity, halving: the highest rate
within objectives, and the best of many settings.
"""
