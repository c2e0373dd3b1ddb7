"""The honest operator, in chunks, on which the cheats in this folder are based.

All modules of this folder are copied into a fork. This one is appended to the honest layer of the
harness tests. There `right` stays the honest operator, and the layer calls `chunk_quasar`.
"""

import torch

CHUNK = 64


def right(q, k, v, beta, initial_state=None, output_final_state=False, **_unused):
    batch, length, heads, size = q.shape
    shape = (batch, heads, size, size)
    state = q.new_zeros(shape).float() if initial_state is None else initial_state.float()
    q_, k_, v_ = (x.float().transpose(1, 2) for x in (q, k, v))
    square = k_.square().sum(-1)
    alpha = -torch.expm1(-beta[:, None] * square) / (square + 1e-8)
    out = []
    for start in range(0, length, CHUNK):
        qc, kc, vc = (x[:, :, start : start + CHUNK] for x in (q_, k_, v_))
        a = alpha[:, :, start : start + CHUNK, None]
        mixing = (a * kc @ kc.mT).tril(-1) + torch.eye(kc.shape[2], device=q.device)
        new = torch.linalg.solve_triangular(mixing, a * (vc - kc @ state), upper=False)
        out.append(qc @ state + (qc @ kc.mT).tril() @ new)
        state = state + kc.mT @ new
    o = torch.cat(out, 2).transpose(1, 2).to(q.dtype)
    return o, state if output_final_state else None


chunk_quasar = right
