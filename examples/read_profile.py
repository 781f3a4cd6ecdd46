"""Where the time of a step goes, from a profile that `jaxserve tune profile` wrote.

    python examples/read_profile.py benchmarks/buckets/steps_tiny_qwen3.json

A body's time has three parts: a base (weights, matmuls, norms of the bucket's tokens), the KV that decodes read, and the query-key
pairs of prompt chunks. The table has them for decode buckets at 512 positions of KV a sequence, then for mixed buckets that one
chunk fills. "us a token" is the whole step over the bucket's tokens: it falls as a bucket grows, until the machine is full.

What it imports are parts of jaxserve that are not public (`jaxserve.__all__` is): another release may have them elsewhere.
"""

import sys

from jaxserve.step_times.fitted import StepTimeModel

KV = 512  # positions that each decode reads


def main(profile: str) -> None:
    model = StepTimeModel.load(profile)
    about = model.about
    print(f"{about['model']} on {about['device']}: {len(model.times)} buckets, measured in {about['seconds']:.0f} s")
    error, spread = about["held_out_error"], about["spread"]
    print(
        f"error on {error['num_points']} held-out steps: median {error['median']:.1%}, P90 {error['p90']:.1%}; spread {spread:.1%}"
    )
    if max(error["median"], spread) > 0.1:
        print("the machine was not quiet: read differences of this size as none")
    print(f"host: {1e3 * model.host_seconds:.2f} ms a step, hidden while the device takes longer")
    print(f"\n{'bucket':>16} {'base':>8} {'KV':>8} {'pairs':>8} {'head':>8} {'us a token':>11}   (ms)")
    for times in sorted(model.times, key=lambda t: (t.max_q_len > 1, t.tokens, t.seqs)):
        bucket, decode = times.bucket, times.max_q_len == 1
        kv = KV * times.seqs if decode else 0
        pairs = 0 if decode else times.tokens * (times.tokens + 1) // 2
        base, per_kv, per_pair = model.coefficients(bucket)
        head = model.head_seconds(times.seqs if decode else 1)
        parts = (base, per_kv * kv, per_pair * pairs, head)
        row = " ".join(f"{1e3 * part:8.2f}" for part in parts)
        print(f"{str(bucket):>16} {row} {1e6 * sum(parts) / times.tokens:11.1f}")


if __name__ == "__main__":
    main(sys.argv[1])
