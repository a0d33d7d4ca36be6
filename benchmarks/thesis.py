"""Does the simulator agree with the table of the NoPFS thesis?"""

import sys, time
from penstock.simulate import run, scenario_of

MB = 10**6
COLUMNS = {  # S MB, E, spread over sqrt(b)
    "0.27 GB": (275, 10, 0.0600, 50_000),
    "150 GB": (150_000, 10, 0.0197, 100_000),
    "600 GB": (600_000, 5, 0.0201, 100_000),
    "1,200 GB": (1_200_000, 5, 0.0133, 100_000),
}
from penstock.simulate.policies.nopfs import Nopfs


class Alone(Nopfs):
    title = "NoPFS, no peers"
    peers = False


PUB = {
    "perfect": (7.30, 3826, 7655, 15205),
    "naive": (27.8, 15131, 30273, 60526),
    "double-buffering": (10.2, 4982, 9945, 19888),
    "deepio-ordered": (8.41, 4433, 23948, 54123),
    "deepio-opportunistic": (8.40, 4433, 8487, 16035),
    "parallel-staging": (10.1, 4973, 9314, 16862),
    "lbann-dynamic": (7.71, 4051, None, None),
    "lbann-preloading": (8.41, 4433, None, None),
    "locality-aware": (8.41, 4433, 9314, 19083),
    Alone: (7.78, 3836, 7661, 16795),
    "nopfs": (7.78, 3836, 7661, 16795),
    "nopfs-released": (None,) * 4,
    "coordl": (None,) * 4,
    "lru": (None,) * 4,
    "belady": (None,) * 4,
    "ours": (None,) * 4,
}
B = 32


def scen(col, scale=1.0, model=True):
    S, E, cv, F = COLUMNS[col]
    F = int(F * scale)
    mean = S * MB // F
    return scenario_of(
        {
            "dataset": {
                "num_samples": F,
                "sample_bytes": mean,
                "spread_bytes": int(mean * cv * B**0.5),
            },
            "job": {
                "epochs": E,
                "nodes": 4,
                "batch": B,
                "compute_bytes_s": 100e6,
                "drop_last": True,
            },
            "loader": {"threads": 2, "fill_threads": 2, "stage_bytes": 1024 * MB},
            "model": {"store_share": "thread", "readers": "in_turn"} if model else {},
            "machine": {
                "cores": 16,
                "store": {
                    "latency_s": 0.0,
                    "latency_p99_s": 0.0,
                    "throughput": {"counts": [1], "bytes_s": [2000e6]},
                    "shared": {"counts": [1, 2, 3, 4], "bytes_s": [66e6, 86e6, 129e6, 146e6]},
                },
                "link": {"bytes_s": 10_000e6},
                "decode": {"counts": [1, 16], "bytes_s": [200e6, 3200e6]},
                "tiers": [
                    {
                        "kind": "memory",
                        "capacity_bytes": 51200 * MB,
                        "read": {"counts": [1], "bytes_s": [28e9]},
                        "write": {"counts": [1], "bytes_s": [28e9]},
                    },
                    {
                        "kind": "disk",
                        "capacity_bytes": 102400 * MB,
                        "read": {"counts": [1, 2], "bytes_s": [86e6, 172e6]},
                        "write": {"counts": [1, 2], "bytes_s": [86e6, 172e6]},
                    },
                ],
            },
        }
    )


if __name__ == "__main__":
    model = len(sys.argv) < 2
    for name, pubs in PUB.items():
        row = []
        for col, pub in zip(COLUMNS, pubs):
            t = time.time()
            r = run(scen(col, model=model), name)
            base = PUB["perfect"][list(COLUMNS).index(col)]
            pr = pub / base if pub else None
            row.append(
                f"{r.time_s:9.1f} {r.time_ratio:6.3f} {pr and round(pr, 3)} {pr and f'{r.time_ratio / pr - 1:+.1%}'}"
                if not r.why_not
                else "n/a"
            )
        print(f"{str(name)[-20:]:22}", " | ".join(row), round(time.time() - t, 1))
