"""The block-sparse gradient exchange in NumPy, to compare with."""

import numpy as np


class Reference:
    """The method in NumPy, float64 norms, one replica after the other."""

    def __init__(self, k, norm, mode, decay=1.0, bits=None):
        self.k, self.norm, self.mode, self.decay, self.bits = k, norm, mode, decay, bits
        self.left = {}

    def __call__(self, name, gradients):
        if gradients[0].ndim == 1:
            return sum(gradients) / np.float32(len(gradients))
        n = gradients[0].shape[-1]
        left = self.left.get(name, [np.zeros_like(g) for g in gradients])
        held = [g + r for g, r in zip(gradients, left, strict=True)]
        rows = [p.astype(np.float64).reshape(-1, n) for p in held]
        norms = [np.abs(p).sum(0) if self.norm == "l1" else (p**2).sum(0) for p in rows]
        if self.mode == "consensus":
            norms = [sum(norms)] * len(held)
        picked = [np.isin(np.arange(n), np.argsort(-x, kind="stable")[: self.k]) for x in norms]
        sent = [np.where(flags, self.coded(p, flags), np.float32(0)) for flags, p in zip(picked, held, strict=True)]
        self.left[name] = [np.float32(self.decay) * (p - s) for p, s in zip(held, sent, strict=True)]
        return sum(sent) / np.float32(len(held))

    def coded(self, p, flags):
        """Each column in 2 bits: the multiple of four levels that is nearest to it. Or the largest of each eight."""
        if self.bits is None:
            return p
        rows = p.astype(np.float64).reshape(-1, p.shape[-1])
        if self.bits == 0.5:
            picked = rows.T[flags].ravel()  # block after block
            largest = [k + np.argmax(np.abs(picked[k : k + 8])) for k in range(0, picked.size, 8)]
            kept = np.zeros_like(picked)
            kept[largest] = np.where(picked[largest] < 0, -1, 1) * np.abs(picked[largest]).mean()
            rows = np.zeros_like(rows)
            rows[:, flags] = kept.reshape(flags.sum(), -1).T
            return rows.astype(np.float32).reshape(p.shape)
        sizes = np.where(np.abs(rows) > 0.9816 * np.sqrt((rows**2).mean(0)), 1.5104, 0.4528)
        levels = np.where(rows < 0, -sizes, sizes)
        scales = [np.linalg.lstsq(levels[:, [j]], rows[:, j])[0][0] for j in range(rows.shape[1])]
        return (levels * scales).astype(np.float32).reshape(p.shape)
